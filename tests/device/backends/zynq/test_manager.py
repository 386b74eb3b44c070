"""Firmware files of the FPGA manager, and mappings of physical memory."""

import pytest

from nearflash.abi.errors import BitstreamError, DeviceError, UnknownDeviceError
from nearflash.device.backends.zynq.manager import FpgaManager, swap_words
from nearflash.device.backends.zynq.physical import PhysicalMemory


def test_words_are_reversed_byte_by_byte():
    assert swap_words(bytes.fromhex("ffffffff aa995566 30018001")) == bytes.fromhex("ffffffff 665599aa 01800130")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xaa\x99\x55\x66\0", bytes(8), bytes.fromhex("00aa9955 66000000")],
    ids=["none", "no words", "no sync", "between words"],
)
def test_data_without_a_sync_word_is_rejected(payload):
    with pytest.raises(BitstreamError, match=f"whole 32-bit words with aa995566 among them, not {len(payload)} bytes"):
        swap_words(payload)


def test_a_machine_without_a_manager(tmp_path):
    with pytest.raises(UnknownDeviceError, match=r"'zynq' needs an FPGA manager, .*fpga0/firmware: boot a kernel with"):
        FpgaManager(tmp_path / "fpga0", tmp_path / "firmware")


def test_words_and_bytes_are_those_of_the_file(tmp_path):
    (tmp_path / "mem").write_bytes(bytes(4096) + b"\1\2\3\4" + bytes(4092))
    memory = PhysicalMemory(tmp_path / "mem")
    words = memory.map_words(4096, 4096)
    assert words.read(0) == 0x04030201
    words.write(4, 0x55AA)
    assert memory.map_bytes(4096, 4096)[4:6].tobytes() == b"\xaa\x55"
    assert (tmp_path / "mem").read_bytes()[4100:4102] == b"\xaa\x55"
    with pytest.raises(DeviceError, match=r"mem must have 8192 bytes at 0x2000 to map, not fail"):
        memory.map_bytes(8192, 8192)
