"""Features and their bits, in a database that the test made."""

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.boards.open.database import Bit, PartDatabase
from nearflash.boards.open.fasm import Feature


@pytest.mark.parametrize(
    ("feature", "bits"),
    [
        (("CLB_X0Y0", "AFF.ZINI", None), [(0x103, 0, 6, True)]),
        (("CLB_X0Y1", "AFF.ZINI", None), [(0x103, 2, 6, True)]),
        (("CLB_X0Y1", "AFF.ZRST", None), [(0x103, 2, 6, True), (0x101, 3, 1, False)]),
        (("CLB_X0Y0", "LUT.INIT", 1), [(0x102, 0, 1, True)]),
        (("CLB_X0Y0", "ONE", 0), [(0x100, 1, 31, True)]),  # written without an index
        (("BRAM_X1Y0", "RAMB18_Y0.IN_USE", None), [(0x201, 0, 0, True)]),
        (("BRAM_X1Y0", "RAMB18_Y0.INIT_00", 0), [(0x800000, 5, 0, True)]),
        (("BRAM_X1Y0", "RAMB18_Y0.INIT_00", 255), [(0x800002, 14, 31, True)]),
        (("IOB_SING_X2Y0", "IOB33_Y0.PULLUP", None), [(0x301, 99, 0, True)]),  # bits and site of another type
        (("CLB_X0Y0", "CLB_IMUX0.CLB_A1", None), []),  # always there
    ],
)
def test_bits_of_a_feature(database, feature, bits):
    assert database.bits(Feature(*feature)) == tuple(Bit(*bit) for bit in bits)


@pytest.mark.parametrize(
    "feature",
    [("CLB_X9Y9", "AFF.ZINI", None), ("CLB_X0Y0", "BFF.ZINI", None), ("CLB_X0Y0", "LUT.INIT", 2),
     ("CLB_X0Y0", "LUT.INIT", None), ("NULL_X3Y0", "A", None), ("BRAM_X1Y0", "CLB_IMUX0.CLB_A1", None)],
)  # fmt: skip
def test_what_no_one_knows_has_no_bits(database, feature):
    assert database.bits(Feature(*feature)) is None


def test_a_part_has_a_device_frames_and_features_of_its_own(database):
    assert database.device == "desk7"
    assert set(database.frames()) == {*range(0x100, 0x104), 0x200, 0x201, *range(0x800000, 0x800003), 0x300, 0x301}
    assert database.list_required() == ["CLB_X0Y1.ALWAYS_ON"]
    assert database.part_file.read_text() == "part\n"


def test_an_unknown_part_lists_what_exists(database):
    with pytest.raises(ConfigError, match=r"part must be one of desk7clg1-1, desk8, not 'desk9'"):
        PartDatabase(database.folder, "desk9")


def test_a_part_may_require_nothing(database):
    (database.folder / "desk7clg1-1/required_features.fasm").unlink()
    assert database.list_required() == []


def test_pins_of_luts_have_the_largest_delay_at_their_wire(database):
    assert database.lut_pins() == {"CLBL_M_A1": 531}
