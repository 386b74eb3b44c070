"""Bits to features and back, in a database that the test made."""

from nearflash.boards.open.decode.features import decode_bits
from nearflash.boards.open.fasm import parse
from nearflash.boards.open.frames import assemble

LINES = ["CLB_X0Y0.AFF.ZINI", "CLB_X0Y1.LUT.INIT[1:0] = 2'b11", "CLB_X0Y1.MUX.B", "BRAM_X1Y0.RAMB18_Y0.INIT_00[255]",
         "BRAM_X1Y0.RAMB18_Y0.IN_USE", "IOB_SING_X2Y0.IOB33_Y0.PULLUP"]  # fmt: skip


def test_features_come_back_from_their_bits(database):
    decoded = decode_bits(database, assemble(database, parse(LINES)))
    assert decoded.unexplained == frozenset()
    assert decoded.features == {
        "CLB_X0Y0": {"AFF.ZINI", "AFF.ZRST"},  # which differ by a bit that is clear in both
        "CLB_X0Y1": {"LUT.INIT[00]", "LUT.INIT[01]", "MUX.B"},
        "BRAM_X1Y0": {"RAMB18_Y0.INIT_00[255]", "RAMB18_Y0.IN_USE"},
        "IOB_SING_X2Y0": {"IOB33_Y0.PULLUP"},  # by the name of its own site
    }


def test_a_clear_bit_counts(database):
    both = {(0x100, 0, 5), (0x100, 0, 7)}  # MUX.A and MUX.B each want the other's bit clear
    assert decode_bits(database, both).unexplained == both


def test_a_bit_that_no_feature_has_stays(database):
    decoded = decode_bits(database, {(0x103, 0, 6), (0x103, 1, 6), (0x999, 0, 0)})
    assert decoded.unexplained == {(0x103, 1, 6), (0x999, 0, 0)}
