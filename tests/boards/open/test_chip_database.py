"""The wires of the processor block in nextpnr's chip database, on a file of a few tiles."""

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.chip_database import correct_processor

BETWEEN, OUTBOUND, OUTPUT, PIN = 11, 22, 23, 27  # kinds, of nextpnr's own names
FABRIC = {
    "INT_L": {"LOGIC_OUTS_L0": OUTBOUND, "IMUX_L0": PIN},
    "INT_INTERFACE_L": {"INT_INTERFACE_BLOCK_OUTS_L_B0": BETWEEN},
}
BLOCK = {"PSS2": {"PS7_FCLKCLK0": OUTPUT, "PSS1_LOGIC_OUTS0_0": OUTBOUND, "PSS1_IMUX0": PIN}}


def test_outputs_inside_the_block_become_wires_between_it_and_the_fabric(tmp_path, chip_file):
    (tmp_path / "chip.bin").write_bytes(chip_file(FABRIC | BLOCK))
    assert correct_processor(tmp_path / "chip.bin", tmp_path / "made.bin") == 2
    block = {"PSS2": {"PS7_FCLKCLK0": BETWEEN, "PSS1_LOGIC_OUTS0_0": BETWEEN, "PSS1_IMUX0": PIN}}
    assert (tmp_path / "made.bin").read_bytes() == chip_file(FABRIC | block)


def test_a_device_without_a_processor_stays_as_it_is(tmp_path, chip_file):
    (tmp_path / "chip.bin").write_bytes(chip_file(FABRIC))
    assert correct_processor(tmp_path / "chip.bin", tmp_path / "made.bin") == 0
    assert (tmp_path / "made.bin").read_bytes() == chip_file(FABRIC)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda chip_file: chip_file(FABRIC | BLOCK, version=7), "of version 6, not 0xca7ca7, 7"),
        (lambda chip_file: chip_file(FABRIC | BLOCK, magic=1), "of version 6, not 0x1, 6"),
        (lambda chip_file: chip_file(FABRIC | BLOCK)[:200], "of version 6: "),
        (lambda chip_file: b"", "of version 6: "),
        (
            lambda chip_file: chip_file({"INT_L": FABRIC["INT_L"]} | BLOCK),
            "with the wire INT_INTERFACE_BLOCK_OUTS_L_B0 ",
        ),
    ],
    ids=["version", "magic", "cut short", "empty", "no such kind"],
)
def test_another_file_is_an_error_and_nothing_is_written(tmp_path, chip_file, made, message):
    (tmp_path / "chip.bin").write_bytes(made(chip_file))
    with pytest.raises(FormatError, match=f"chip.bin must be a chip database {message}"):
        correct_processor(tmp_path / "chip.bin", tmp_path / "made.bin")
    assert not (tmp_path / "made.bin").exists()
