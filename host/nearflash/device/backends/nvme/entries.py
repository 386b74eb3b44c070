"""Submission queue entries of NVMe, 64 bytes: one table of opcodes and fields builds them, and takes them apart.

Sources: NVM Express Base Specification 2.1, 3.3.3 (the common entry), 5.1.13 (Identify), Figure 142 (admin opcodes);
Computational Programs Command Set Specification 1.0 and 1.1: Execute Program (Figures 16 to 22), memory ranges (34),
Load Program (39 to 44), Memory Range Set Management (46 to 48), Program Activation Management (52); Subsystem Local
Memory Command Set Specification 1.0: Memory Copy, Memory Read, Memory Write. Fields were compared with two public
programs, an SPDK target and FEMU, which has opcodes of its own; no drive was at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = [
    "ACTIVATE",
    "ENTRY_BYTES",
    "EXECUTE",
    "IDENTIFY",
    "LOAD",
    "MEMORY_COPY",
    "MEMORY_READ",
    "MEMORY_WRITE",
    "OPCODES",
    "RANGE_SET",
    "CommandSet",
    "Opcode",
    "Statuses",
    "SubmissionEntry",
    "copy_sources",
    "memory_ranges",
    "status_text",
]  # fmt: skip

ENTRY_BYTES = 64
_DWORD_BITS = 32


class CommandSet(IntEnum):
    """Command set identifiers (Base 2.1, Figure 311)."""

    NVM = 0
    MEMORY = 3
    """Subsystem Local Memory."""
    PROGRAMS = 4
    """Computational Programs."""


class Statuses(IntEnum):
    """Status type and code that hosts and drives here name (Base 2.1, Figures 102 and 103; type in bits 10 to 8)."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    DATA_TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    ABORTED = 0x007
    INVALID_NAMESPACE = 0x00B
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    ABORTED_BY_HOST = 0x371


_STATUS_BITS = 0x7FF


def status_text(status: int) -> str:
    """Name and number of a status as Linux returns it, which may have Do Not Retry and More set."""
    code = status & _STATUS_BITS
    known = Statuses(code).name if code in list(Statuses) else f"type {code >> 8:x}h code {code & 0xFF:02x}h"
    return f"{known} ({status:#06x})"


@dataclass(frozen=True)
class Opcode:
    """A command; `fields` gives the dword, the first bit in it and the bits of each."""

    name: str
    code: int
    fields: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    admin: bool = False

    def pack(self, namespace: int, **values: int) -> "SubmissionEntry":
        """The entry, without command identifier and data pointer, which the driver sets. Raises ValueError."""
        entry = self.code | namespace << _DWORD_BITS
        for name, value in values.items():
            dword, low, bits = self.fields[name]
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} of {self.name} must have {bits} bits, not be {value!r}")
            entry |= value << _DWORD_BITS * dword + low
        return SubmissionEntry(self, namespace, entry.to_bytes(ENTRY_BYTES, "little"))

    def unpack(self, entry: bytes) -> dict[str, int]:
        """The fields of an entry, and `namespace`."""
        number = int.from_bytes(entry, "little")
        values = {name: number >> _DWORD_BITS * dword + low & (1 << bits) - 1
                  for name, (dword, low, bits) in self.fields.items()}  # fmt: skip
        return {"namespace": number >> _DWORD_BITS & 0xFFFF_FFFF, **values}


@dataclass(frozen=True)
class SubmissionEntry:
    """A command to a namespace; `raw`: its 64 bytes."""

    opcode: Opcode
    namespace: int
    raw: bytes


IDENTIFY = Opcode("Identify", 0x06, {"cns": (10, 0, 8), "csi": (11, 24, 8)}, admin=True)
LOAD = Opcode(
    "Load Program",
    0x85,
    {"pind": (10, 0, 16), "ptype": (10, 16, 8), "sel": (10, 24, 1), "pit": (10, 25, 3), "psize": (11, 0, 32),
     "pid": (12, 0, 64), "numb": (14, 0, 32), "loff": (15, 0, 32)},
    admin=True,
)  # fmt: skip
"""sel: 0 loads, 1 unloads. pit 1: pid is unique."""
ACTIVATE = Opcode("Program Activation Management", 0x88, {"pind": (10, 0, 16), "sel": (10, 16, 4)}, admin=True)
"""sel: 0 deactivates, 1 activates."""
RANGE_SET = Opcode("Memory Range Set Management", 0x89, {"sel": (10, 0, 4), "rsid": (10, 16, 16), "numr": (11, 0, 8)},
                   admin=True)  # fmt: skip
"""sel: 0 creates, with ranges as data, and returns the set's identifier; 1 deletes."""
EXECUTE = Opcode(
    "Execute Program",
    0x01,
    {"pind": (2, 0, 16), "rsid": (2, 16, 16), "numr": (3, 0, 32), "cparam1": (10, 0, 64), "cparam2": (12, 0, 64)},
)
"""Without dlen, dword 4: Linux' passthrough has its metadata pointer there, so that no data can go with it."""
MEMORY_COPY = Opcode("Memory Copy", 0x01, {"length": (2, 0, 64), "address": (10, 0, 64), "count": (12, 0, 8),
                                           "format": (12, 8, 4)})  # fmt: skip
"""count: sources less one. format 2: sources are logical blocks of another namespace."""
MEMORY_READ = Opcode("Memory Read", 0x02, {"address": (10, 0, 64), "length": (12, 0, 32)})
MEMORY_WRITE = Opcode("Memory Write", 0x05, {"address": (10, 0, 64), "length": (12, 0, 32)})
OPCODES = (IDENTIFY, LOAD, ACTIVATE, RANGE_SET, EXECUTE, MEMORY_COPY, MEMORY_READ, MEMORY_WRITE)


def memory_ranges(namespace: int, ranges: Mapping[int, int]) -> bytes:
    """Descriptors of a memory range set, 32 bytes each: of its bytes by their address."""
    return b"".join(
        namespace.to_bytes(4, "little") + size.to_bytes(4, "little") + address.to_bytes(8, "little") + bytes(16)
        for address, size in ranges.items()
    )


def copy_sources(namespace: int, runs: Mapping[int, int]) -> bytes:
    """Source ranges of a Memory Copy in format 2, 32 bytes each: numbers of logical blocks by the first of them."""
    return b"".join(
        namespace.to_bytes(4, "little") + bytes(4) + first.to_bytes(8, "little") + (blocks - 1).to_bytes(2, "little")
        + bytes(14)
        for first, blocks in runs.items()
    )  # fmt: skip
