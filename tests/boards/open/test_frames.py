"""Features become frames: all of them, nothing unknown, nothing contradictory."""

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.fasm import Feature, parse
from nearflash.boards.open.frames import assemble, read_bits, write_frames


def features(*lines):
    return list(parse(lines))


def test_features_set_their_bits(database):
    found = assemble(database, features("CLB_X0Y0.AFF.ZINI", "CLB_X0Y1.LUT.INIT[1:0] = 2'b11", "CLB_X0Y0.MUX.A"))
    assert found == {(0x103, 0, 6), (0x102, 2, 0), (0x102, 2, 1), (0x100, 0, 5)}


def test_what_a_feature_clears_is_not_set_and_may_be_cleared_twice(database):
    found = assemble(database, features("CLB_X0Y0.AFF.ZRST", "CLB_X0Y0.AFF.ZINI", "CLB_X0Y0.AFF.ZRST"))
    assert found == {(0x103, 0, 6)}


def test_unknown_features_are_an_error_with_their_names(database):
    lines = ["CLB_X0Y0.BFF.ZINI", "CLB_X0Y0.AFF.ZINI", "CLB_X7Y0.AFF.ZINI", "CLB_X0Y0.LUT.INIT[3]"]
    with pytest.raises(FormatError, match=r"desk7clg1-1, not CLB_X0Y0.BFF.ZINI, CLB_X0Y0.LUT.INIT\[3\], CLB_X7Y0.AFF"):
        assemble(database, features(*lines))
    many = [Feature("CLB_X0Y0", f"F{number:02d}") for number in range(13)]
    with pytest.raises(FormatError, match="F09 and 3 more"):
        assemble(database, many)


@pytest.mark.parametrize("order", [1, -1])
def test_contradicting_features_are_an_error_with_both_names(database, order):
    lines = ["CLB_X0Y0.MUX.A", "CLB_X0Y0.MUX.B"][::order]
    with pytest.raises(
        FormatError, match=r"features must agree on bit 0x00000100.0.\d, which CLB_X0Y0.MUX.\w sets and"
    ):
        assemble(database, features(*lines))
    bit5 = "A sets and CLB_X0Y0.MUX.B" if order == 1 else "A sets and CLB_X0Y0.MUX.B|B sets and CLB_X0Y0.MUX.A"
    with pytest.raises(FormatError, match=bit5):
        assemble(database, features(*lines))


def test_frames_are_all_written_in_order_of_address(database, tmp_path):
    path = tmp_path / "x.frm"
    write_frames(path, database.frames(), {(0x103, 2, 31), (0x103, 2, 0), (0x800002, 100, 1)})
    rows = [line.split() for line in path.read_text().splitlines()]
    assert [int(address, 16) for address, _ in rows] == sorted(set(database.frames()))
    words = {int(address, 16): [int(word, 16) for word in row.split(",")] for address, row in rows}
    assert all(len(row) == 101 for row in words.values())
    set_words = {(frame, at): word for frame, row in words.items() for at, word in enumerate(row) if word}
    assert set_words == {(0x103, 2): 0x80000001, (0x800002, 100): 2}


@pytest.mark.parametrize("place", [(0x104, 0, 0), (0x103, 101, 0), (0x103, -1, 0)])
def test_a_bit_outside_the_parts_frames_is_an_error(database, tmp_path, place):
    path = tmp_path / "x.frm"
    with pytest.raises(FormatError, match="bits must lie in the part's frames, not at"):
        write_frames(path, database.frames(), {place})
    assert not path.exists()


def test_bits_are_read_from_what_bitread_writes():
    text = "Bitstream size: 4045660 bytes\nbit_00000103_002_31\nbit_00800002_100_01\nDONE\n"
    assert read_bits(text) == {(0x103, 2, 31), (0x800002, 100, 1)}
    assert read_bits("") == set()
