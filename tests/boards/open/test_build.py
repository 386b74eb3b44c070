"""The whole flow with stand-ins of its programs: what ends up beside the board, and what leaves it as it was."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from nearflash.abi.errors import BitstreamError, ConfigError, FormatError
from nearflash.abi.kernel.config import config
from nearflash.boards.design.revision import revision_of
from nearflash.boards.open import build as flow
from nearflash.boards.open import database as database_module
from nearflash.boards.open.build import build, design_digest
from nearflash.boards.open.decode.detours import Edits
from nearflash.boards.open.decode.paths import EarlyPath, TimingResult
from nearflash.boards.open.fasm import Feature
from nearflash.boards.open.frames import read_bits
from nearflash.boards.open.packages import PACKAGES, SidPrograms, ToolsError
from nearflash.device.bitstreams import load_board, load_manifest
from nearflash.device.bitstreams.board import Resources
from nearflash.device.bitstreams.header import BitHeader, split_bit

FASM = "CLB_X0Y0.AFF.ZINI\nCLB_X0Y0.LUT.INIT[1:0] = 2'b10\n"
REPORT = {"fmax": {"clk": {"achieved": 101.5}}, "critical_paths": []}


def _design_text(build_config, git_revision=0):
    return f"{build_config.full_name} of {git_revision:08x}"


def _netlist(cells):
    return {"modules": {"top": {"cells": cells}}}


def _payload(path):
    return path.read_bytes()[-split_bit(path)[0].payload_bytes :].decode()


class StandIn(SidPrograms):
    """The three programs: a route that is given, a .bit that holds its frames, and bitread of it."""

    fasm, lost_bits = FASM, 0

    def chip_database(self, device):
        return self.root / device

    def bit_database(self, family):
        return self.root / "database"

    def run(self, program, *arguments, log, stop=None):
        options = [str(argument) for argument in arguments]
        values = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
        if program == "xc7frames2bit":
            assert values["part_name"] == "desk7clg1-1"
            frames = Path(values["frm_file"]).read_bytes()
            header = BitHeader(values["frm_file"], "desk7clg1-1", "2026/11/25", "03:54:32", len(frames))
            Path(values["output_file"]).write_bytes(header.to_bytes() + frames)
            return ""
        if program == "bitread":
            rows = [line.split() for line in _payload(Path(options[-1])).splitlines()]
            words = [(int(address, 16), at, int(word, 16)) for address, row in rows
                     for at, word in enumerate(row.split(","))]  # fmt: skip
            places = [(frame, at, bit) for frame, at, word in words for bit in range(32) if word >> bit & 1]
            found = [f"bit_{frame:08x}_{at:03d}_{bit:02d}" for frame, at, bit in places]
            return "\n".join(found[self.lost_bits :])
        (log.parent / "top.fasm").write_text(self.fasm)
        (log.parent / "top.report.json").write_text(json.dumps(REPORT))
        (log.parent / "top.routed.json").write_text(json.dumps(_netlist({})))
        return ""


@pytest.fixture
def board(database, tmp_path, monkeypatch):
    """A board of the small part, whose design is a line."""
    folder = tmp_path / "bitstreams" / "desk"
    folder.mkdir(parents=True)
    (folder / "board.toml").write_text(
        'format = "nearflash board"\nversion = 1\nname = "desk"\ntitle = "x"\npart = "desk7clg1-1"\nfamily = "xc7"\n'
        'flow = "open"\nbackend = "pynq"\nclock_hz = 1\nkernels = ["update-tiny"]\nsources = []\n'
        "memory = { base_address = 0, size_bytes = 1, bandwidth_bytes_per_s = 1 }\n"
        "resources = { lut = 1, ff = 1, dsp = 1, bram36 = 1 }\n"
        'pins = { led = "A1" }\nrouting.update = { freq_hz = 100_000_000, seed = 1 }\n'
    )
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(folder.parent))
    monkeypatch.setitem(database_module._FAMILIES, "desk", "small")
    monkeypatch.setattr(flow, "design_text", _design_text)
    monkeypatch.setattr(flow, "synthesise", lambda source, family, settings, dsp_adder_bits: _netlist({}))
    monkeypatch.setattr(flow, "count_cells", lambda cells: Resources(1, 2, 3, 4.5))
    return load_board("desk")


@pytest.fixture
def programs(tmp_path, chip_file):
    (tmp_path / "desk7").write_bytes(chip_file({}))
    return StandIn(tmp_path, dict.fromkeys(PACKAGES, "1.0"))


def test_a_build_puts_bitstream_handoff_and_manifest_beside_the_board(board, programs, tmp_path):
    manifest = build(board, "update", tmp_path / "work", programs)
    assert manifest == load_manifest(board, "update")
    manifest.verify()
    assert sorted(manifest.files) == ["update.bit", "update.hwh", "update.places.xz"]
    assert (manifest.fmax_hz, manifest.clock_hz, manifest.evidence) == (101_500_000, 62_500_000, "routed")
    assert (manifest.derating, manifest.timing_model) == (flow.CLOCK_DERATING[False], flow.TIMING_MODELS[False]) and (
        manifest.clock_hz <= 0.65 * manifest.fmax_hz
    ), "until timing is proved"
    assert manifest.utilisation == Resources(1, 2, 3, 4.5)
    assert {"amaranth", "yosys", *PACKAGES} == manifest.tools.keys()
    assert (manifest.config, manifest.digest) == ("update-tiny", config("update-tiny").digest)
    assert manifest.design == design_digest(config("update-tiny"))
    bits = programs.run("bitread", "-y", manifest.file(".bit"), log=tmp_path / "log")
    assert read_bits(bits) == {(0x103, 0, 6), (0x102, 0, 1), (0x100, 2, 0)}  # and the feature that the part requires


def test_the_manifest_has_the_timing_of_the_decoded_netlist_and_its_clock_keeps_to_it(
    board, programs, tmp_path, monkeypatch
):
    found = TimingResult((20_000, 17_000, 9_000), (-7, 0, 5), ("1.00 ns A/S.AFF", "20.00 ns A/S.BFF.D"))
    monkeypatch.setattr(flow, "time_netlist", lambda netlist: found)
    with pytest.warns(match="1 of 3 endpoints hold too short, the worst by 7 ps: no clock helps, another seed"):
        manifest = build(board, "update", tmp_path / "work", programs)
    assert (manifest.fmax_hz, manifest.decoded_fmax_hz, manifest.clock_hz) == (101_500_000, 50_000_000, 43_478_260)
    assert (manifest.late_endpoints, manifest.hold_violations) == (0, 1)
    assert manifest.decoded_path == found.critical_path
    assert load_manifest(board, "update") == manifest


def test_signals_that_change_too_early_get_detours(board, programs, tmp_path, monkeypatch):
    early = TimingResult((9_000,), (-7,), ("1.00 ns A/S.AFF",), (EarlyPath(-7, ("A/S.AFF", "A/S@AX")),))
    kept, old = replace(early, hold_slacks_ps=(20,), early_paths=()), (0x103, 0, 6)
    edits = Edits(frozenset({Feature("CLB_X0Y0", "AFF.ZINI")}), frozenset({Feature("CLB_X0Y0", "ONE")}))
    monkeypatch.setattr(flow, "read_pins", lambda database, bits: bits)
    monkeypatch.setattr(flow, "time_netlist", lambda bits: early if old in bits else kept)
    monkeypatch.setattr(flow, "lengthen", lambda bits, timing: edits)
    manifest = build(board, "update", tmp_path / "work", programs)
    assert manifest.hold_violations == 0
    bits = read_bits(programs.run("bitread", "-y", manifest.file(".bit"), log=tmp_path / "log"))
    assert old not in bits and (0x100, 1, 31) in bits


def test_slices_whose_delays_nobody_knows_are_a_warning(board, programs, tmp_path, monkeypatch):
    monkeypatch.setattr(flow, "synthesise", lambda *_: _netlist({"mul": {"type": "DSP48E1"}}))
    with pytest.warns(match="no delays of DSP48E1 for desk7clg1-1: Fmax leaves them out"):
        build(board, "update", tmp_path / "work", programs)


def test_the_design_states_the_revision_of_its_sources(board, programs, tmp_path):
    manifest = build(board, "update", tmp_path / "work", programs)
    head = subprocess.run(["git", "-C", flow.__file__.rpartition("/")[0], "rev-parse", "HEAD"], capture_output=True)
    assert manifest.git == (head.stdout.decode().strip() or "0" * 40)
    assert (tmp_path / "work/top.il").read_text() == f"update-tiny of {manifest.git[:8]}"


def test_an_unchanged_design_keeps_its_revision_and_so_its_files(board, programs, tmp_path):
    first = build(board, "update", tmp_path / "work", programs)
    path = board.folder / "update.json"
    older = replace(first, git="ab" * 20)
    path.write_text(older.to_json())
    assert revision_of(board, "update", first.design) == "ab" * 20
    assert revision_of(board, "update", "0" * 64) == first.git
    assert build(board, "update", tmp_path / "again", programs) == older


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"fasm": FASM + "CLB_X0Y0.NEW\n"},
            FormatError,
            "features must be in the database of desk7clg1-1, not CLB_X0Y0.NEW",
        ),
        ({"fasm": "CLB_X0Y0.MUX.A\nCLB_X0Y0.MUX.B\n"}, FormatError, "features must agree on bit"),
        ({"fasm": "junk"}, FormatError, "line 1 must be a FASM feature"),
        ({"lost_bits": 2}, BitstreamError, "top.bit must read back as it was written, but 2 bits differ"),
    ],
)
def test_what_goes_wrong_changes_nothing_beside_the_board(board, programs, tmp_path, change, error, message):
    for name, value in change.items():
        object.__setattr__(programs, name, value)
    with pytest.raises(error, match=message):
        build(board, "update", tmp_path / "work", programs)
    assert [path.name for path in board.folder.iterdir()] == ["board.toml"]


def test_boards_of_other_flows_and_other_kernels_are_refused(board, programs, tmp_path):
    with pytest.raises(ConfigError, match="flow of desk must be open, not vitis"):
        build(replace(board, flow="vitis"), "update", tmp_path, programs)
    with pytest.raises(ConfigError, match="kernel of desk must be one of update, not 'attend'"):
        build(board, "attend", tmp_path, programs)


def test_without_programs_the_reason_is_stated(board, monkeypatch, tmp_path):
    def refuse():
        raise ToolsError("the open flow needs Debian")

    monkeypatch.setattr(flow, "fetch", refuse)
    with pytest.raises(ToolsError, match="the open flow needs Debian"):
        build(board, "update", tmp_path / "work")


def test_a_kernel_without_a_start_for_its_routing_is_named(board, programs, tmp_path):
    bare = replace(board, routing={})
    with pytest.raises(ConfigError, match=r"board.toml of desk must have routing.update"):
        build(bare, "update", tmp_path / "work", programs)
    assert not (tmp_path / "work").exists()
