"""CRC32C of bytes at an address, for compiled loops: by the processor's own instruction, or by a table.

Three parts of a block are summed at once, as an instruction takes three cycles and the next can begin after one; a
sum is moved behind the bytes of the parts after it by tables, as that is linear.

Source: Gopal et al., Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction (Intel, 2011).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nearflash.abi.crc import CRC_TABLE
from nearflash.device.backends.host.vector.chunks import load64
from nearflash.device.backends.host.vector.compiled import compiled

__all__ = ["checksum_by", "crc32c_at", "table_step"]

_LONG_BYTES, _SHORT_BYTES = 8192, 256
"""Of a part: what comes from memory comes faster in long ones; short ones sum most of what is left."""
_FEATURES = {"x86_64": "sse4.2", "aarch64": "crc"}
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_TABLE = np.array(CRC_TABLE, np.uint32)


def _moves(size: int) -> NDArray[np.uint32]:
    """(4, 256): what each byte of a register becomes behind `size` bytes of zeros, a power of two."""
    table = np.zeros((4, 256), np.uint32)
    table[0], table[1:] = _TABLE, [np.arange(256, dtype=np.uint32) << np.uint32(8 * place) for place in range(3)]
    for _ in range(size.bit_length() - 1):  # twice as many
        table = np.bitwise_xor.reduce([table[place][table >> np.uint32(8 * place) & 0xFF] for place in range(4)])
    return table


@compiled
def _behind(table: Any, register: Any) -> Any:
    return (
        table[0, register & np.uint32(0xFF)]
        ^ table[1, register >> np.uint32(8) & np.uint32(0xFF)]
        ^ table[2, register >> np.uint32(16) & np.uint32(0xFF)]
        ^ table[3, register >> np.uint32(24)]
    )


@intrinsic  # type: ignore[untyped-decorator]
def _instruction(_: Any, register: Any, word: Any) -> Any:
    """The register after eight bytes."""

    def generate(_: Any, builder: Any, signature: Any, given: Any) -> Any:
        register, word = given
        if _machine() == "x86_64":
            name, register, result = "llvm.x86.sse42.crc32.64.64", builder.zext(register, _LONG), _LONG
        else:
            name, result = "llvm.aarch64.crc32cx", _WORD
        kind = ir.FunctionType(result, [register.type, _LONG])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        found = builder.call(function, [register, word])
        return builder.trunc(found, _WORD) if result is _LONG else found

    return types.uint32(types.uint32, types.uint64), generate


@compiled
def table_step(register: Any, word: Any) -> Any:
    """The register after eight bytes, without the instruction."""
    for place in range(8):
        byte = np.uint32(word >> np.uint64(8 * place)) & np.uint32(0xFF)
        register = register >> np.uint32(8) ^ _TABLE[(register ^ byte) & np.uint32(0xFF)]
    return register


def _machine() -> str:
    return str(binding.get_process_triple()).partition("-")[0]


def _summed(step: Any, part_bytes: int) -> Any:
    """The function of register, address and end: the register after all whole blocks of three parts, and where."""
    one, two = _moves(part_bytes), _moves(2 * part_bytes)

    @compiled
    def summed(register: Any, at: Any, end: Any) -> Any:
        while at + 3 * part_bytes <= end:
            second, third = np.uint32(0), np.uint32(0)
            for offset in range(at, at + part_bytes, 8):
                register = step(register, load64(offset))
                second = step(second, load64(offset + part_bytes))
                third = step(third, load64(offset + 2 * part_bytes))
            register = _behind(two, register) ^ _behind(one, second) ^ third
            at += 3 * part_bytes
        return register, at

    return summed


def checksum_by(step: Callable[..., Any]) -> Any:
    """The function `crc32c(address, size)` of a step of eight bytes: CRC32C (uint32) of `size` bytes, size % 8 = 0."""
    long, short = _summed(step, _LONG_BYTES), _summed(step, _SHORT_BYTES)

    @compiled
    def crc32c(address: Any, size: Any) -> Any:
        register, end = np.uint32(0xFFFFFFFF), address + size
        register, at = long(register, address, end)
        register, at = short(register, at, end)
        for offset in range(at, end, 8):
            register = step(register, load64(offset))
        return register ^ np.uint32(0xFFFFFFFF)

    return crc32c


crc32c_at = checksum_by(
    _instruction if binding.get_host_cpu_features().get(_FEATURES.get(_machine(), "")) else table_step
)
"""For the processor at hand."""
