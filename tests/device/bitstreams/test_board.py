"""Boards: read to the last key, or rejected with the key's name."""

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import config
from nearflash.device.bitstreams import bitstreams_root, boards, load_board
from nearflash.device.bitstreams.board import FLOWS, Limits, PortMemory, Resources


def test_a_board_has_what_its_file_states(desk):
    board = load_board("desk")
    assert (board.name, board.part, board.family, board.flow) == ("desk", "xc7z020clg400-1", "xc7", "open")
    assert (board.backend, board.platform, board.clock_hz) == ("pynq", "none", 50_000_000)
    assert board.memory == PortMemory(0, 4096, 1000)
    assert board.resources == Resources(100, 200, 3, 4.5)
    assert board.limits == {"update": Limits(50, 60, 2, 1, 40_000_000)}
    assert board.sources == ("a data sheet",)
    assert board.folder == desk.resolve()


def test_a_kernels_build_is_the_boards(desk):
    board = load_board("desk")
    assert board.build("update") is config("update-tiny")
    with pytest.raises(ConfigError, match="kernel of desk must be one of update, attend, not 'expand'"):
        board.build("expand")


def test_an_unknown_board_lists_what_exists(desk):
    assert boards() == ["desk"]
    for name in ("pynq", "..", "", "desk/"):
        with pytest.raises(ConfigError, match=f"board must be one of desk, not '{name}'"):
            load_board(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "version = 2", r'must begin with format = "nearflash board" and version = 1'),
        ('format = "nearflash board"', "", r'must begin with format = "nearflash board"'),
        ('name = "desk"', 'name = "table"', "name must be that of its folder, not 'table'"),
        ('name = "desk"', 'name = ""', "name must be text, not ''"),
        ('flow = "open"', 'flow = "shut"', "flow must be one of open, vivado, vitis, not 'shut'"),
        ('part = "xc7z020clg400-1"', "", "must have part"),
        ('part = "xc7z020clg400-1"', "part = 7", "part must be text, not 7"),
        ('part = "xc7z020clg400-1"', 'part = "x"\nspeed = 1', "must have only name, .*, not speed"),
        ("clock_hz = 50_000_000", "clock_hz = -1", "clock_hz must be at least 0, not -1"),
        ("clock_hz = 50_000_000", "clock_hz = 1.5", "clock_hz must be a whole number, not 1.5"),
        ("clock_hz = 50_000_000", "clock_hz = true", "clock_hz must be a whole number, not True"),
        ("bram36 = 4.5", 'bram36 = "4"', "resources.bram36 must be a number, not '4'"),
        ("bram36 = 4.5", "bram36 = inf", "bram36 must be at least 0, not inf"),
        ("resources = {", "memories = {", "must have resources"),
        ("sources = [", "sources = [7, ", r"sources\[0\] must be text, not 7"),
        ('sources = ["a data sheet"]', 'sources = "a data sheet"', "sources must be a list, not 'a data sheet'"),
        ("limits.update = {", "limits.expand = {", "limits must be of kernels that desk has, not of expand"),
        ("limits.update = {", "limits = 3\nlimit = {", "must have only"),
        ("limits.update", "routing.expand = { freq_hz = 1, seed = 1 }\nlimits.update", "routing must be of kernels"),
        (
            "limits.update",
            "routing.update = { freq_hz = 1, seed = 1, dsp_adder_bits = 49 }\nlimits.update",
            "dsp_adder_bits must be between 0 and 48, not 49",
        ),
        ("limits.update", "routing.update = { freq_hz = 1 }\nlimits.update", "routing.update must have seed"),
        ("limits.update", "pins = { led = 4 }\nlimits.update", "pins.led must be text, not 4"),
        (
            "fmax_hz = 40",
            "fmin_hz = 40",
            "limits.update must have only lut, ff, dsp, bram36, fmax_hz, logic_depth, not fmin_hz",
        ),
        ('"update-tiny"', '"update-huge"', "configuration must be one of .*, not 'update-huge'"),
        ("version = 1", "version = = 1", "board.toml must be a readable TOML file"),
    ],
)
def test_a_file_that_is_no_boards_is_rejected_with_the_key(desk, old, new, message):
    path = desk / "board.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_board("desk")


def test_a_table_must_be_one(desk):
    path = desk / "board.toml"
    path.write_text(path.read_text().replace("limits.update = {", "limits = 3 #"))
    with pytest.raises(ConfigError, match="limits must be a table, not 3"):
        load_board("desk")
    path.write_text(path.read_text().replace("limits = 3 #", "limits.update = 3 #"))
    with pytest.raises(ConfigError, match=r"limits.update must be a table, not 3"):
        load_board("desk")


def test_a_folder_that_does_not_exist_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"NEARFLASH_BITSTREAMS must name the folder bitstreams .*nowhere'"):
        bitstreams_root()


def test_the_boards_of_the_source_tree_are_read_and_fit_their_parts():
    assert "pynq-z2" in boards()
    for name in boards():
        board = load_board(name)
        assert (
            board.flow in FLOWS and board.backend in ("pynq", "xrt", "zynq", "none") and board.kernels and board.sources
        )
        assert (board.platform != "none") == (board.flow == "vitis")
        for limits in board.limits.values():
            most = board.resources
            assert limits.lut <= most.lut and limits.ff <= most.ff
            assert limits.dsp <= most.dsp and limits.bram36 <= most.bram36
