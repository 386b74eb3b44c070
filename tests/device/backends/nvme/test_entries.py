"""Entries of 64 bytes: every field in its place, and back."""

import pytest

from nearflash.abi.errors import DeviceError, WaitTimeoutError
from nearflash.device.backends.nvme.drive import check_status
from nearflash.device.backends.nvme.entries import (
    EXECUTE,
    LOAD,
    MEMORY_WRITE,
    OPCODES,
    copy_sources,
    memory_ranges,
    status_text,
)


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
def test_fields_are_apart_and_come_back(opcode):
    taken = 0
    for name, (_, _, bits) in opcode.fields.items():
        entry = opcode.pack(0, **{name: (1 << bits) - 1}).raw
        places = int.from_bytes(entry, "little") & ~0xFF
        assert len(entry) == 64 and entry[0] == opcode.code and places.bit_count() == bits and not places & taken
        taken |= places
    values = {name: bits for name, (_, _, bits) in opcode.fields.items()}
    values = {name: value % (1 << opcode.fields[name][2]) for name, value in values.items()}
    assert opcode.unpack(opcode.pack(9, **values).raw) == {"namespace": 9, **values}
    # Namespace and data pointer are the driver's own.
    assert not taken >> 32 & 0xFFFF_FFFF and not taken >> 8 * 24 & (1 << 8 * 16) - 1


def test_the_places_of_the_standard():
    entry = EXECUTE.pack(3, pind=1, rsid=2, cparam1=0x1122334455667788).raw
    assert (entry[:4], entry[4:8], entry[8:12]) == (b"\x01\0\0\0", b"\x03\0\0\0", b"\x01\0\x02\0")
    assert entry[40:48] == bytes.fromhex("8877665544332211")
    entry = LOAD.pack(3, pind=1, ptype=2, pit=1, psize=5, pid=6, numb=7, loff=8).raw
    assert entry[40:64].hex() == "01000202" + "05000000" + "0600000000000000" + "07000000" + "08000000"
    assert memory_ranges(2, {0x1000: 0x2000}).hex() == "02000000" + "00200000" + "0010000000000000" + 32 * "0"
    assert copy_sources(1, {9: 3}).hex() == "01000000" + 8 * "0" + "0900000000000000" + "0200" + 28 * "0"


def test_a_value_that_has_no_room_is_named():
    with pytest.raises(ValueError, match="length of Memory Write must have 32 bits, not be 4294967296"):
        MEMORY_WRITE.pack(1, length=1 << 32)


def test_statuses_by_name():
    assert status_text(0x4002) == "INVALID_FIELD (0x4002)" and status_text(0x1F0) == "type 1h code f0h (0x01f0)"
    check_status(LOAD.pack(1), 0, 1)
    with pytest.raises(DeviceError, match="Load Program must succeed, but the drive's status is CAPACITY_EXCEEDED"):
        check_status(LOAD.pack(1), 0x4081, 1)
    with pytest.raises(WaitTimeoutError, match="Load Program must end within 2 s"):
        check_status(LOAD.pack(1), 0x371, 2)
