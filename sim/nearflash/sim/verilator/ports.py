"""Values of ports as numpy arrays in Verilator's layout, and the C++ accessors that read and write them.

A port of up to 64 bits is one integer an item, a wider one a row of uint32 words, low word first.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.sim.verilog import Port

__all__ = [
    "accessors",
    "integers_from_words",
    "pointers",
    "row_count",
    "sign_extended",
    "to_words",
    "words_from_integers",
]


def words_from_integers(values: Sequence[int], width: int) -> NDArray[np.uint32]:
    """Python integers (signed or not) as rows of uint32 words, low first, for a port of `width` > 64 bits."""
    words, mask = -(-width // 32), (1 << width) - 1
    text = b"".join((int(value) & mask).to_bytes(4 * words, "little") for value in values)
    return np.frombuffer(text, np.dtype("<u4")).reshape(-1, words).astype(np.uint32)


def integers_from_words(words: NDArray[np.uint32], width: int | None = None) -> list[int]:
    """Rows of uint32 words, low first, as Python integers; signed two's complement where `width` is given."""
    values = [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in words]
    return values if width is None else [value - (1 << width) * (value >> (width - 1)) for value in values]


def row_count(port: Port, value: ArrayLike) -> int:
    """Rows in `value`; 1 for a single value, which is held for a whole burst."""
    shape = np.shape(value)
    return 1 if len(shape) == (port.width > 64) else shape[0]


def to_words(port: Port, value: ArrayLike, count: int) -> NDArray[Any]:
    """`value` as a contiguous array of `count` rows in Verilator's layout: bits above the port's width are zero.

    Raises ValueError for a wrong shape, a type that is no integer, or a value that the port cannot hold.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iub":
        raise ValueError(f"input `{port.name}` must be of an integer type, not {array.dtype}")
    shape = (count,) if port.width <= 64 else (count, port.words)
    try:
        array = np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"input `{port.name}` must have the shape {shape}, not {array.shape}") from None
    if port.width > 64:
        return np.ascontiguousarray(array, np.uint32)
    low, high = (-(1 << (port.width - 1)), (1 << (port.width - 1)) - 1) if port.signed else (0, (1 << port.width) - 1)
    if count and (int(array.min()) < low or int(array.max()) > high):
        raise ValueError(f"input `{port.name}` must be within [{low}, {high}], not [{array.min()}, {array.max()}]")
    unsigned = np.ascontiguousarray(array.astype(port.dtype)).view(f"u{port.dtype.itemsize}")
    return unsigned & unsigned.dtype.type((1 << port.width) - 1) if port.signed else unsigned


def sign_extended(port: Port, array: NDArray[Any]) -> NDArray[Any]:
    """`array` as Verilator wrote it, with the port's sign in the bits above its width; wide ports are left as words."""
    if not port.signed or port.width > 64:
        return array
    spare = port.dtype.type(8 * port.dtype.itemsize - port.width)
    return (array << spare) >> spare


def pointers(arrays: Sequence[NDArray[Any]]) -> Any:
    """A C array of the arrays' data pointers."""
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def accessors(inputs: Sequence[Port], outputs: Sequence[Port], names: frozenset[str]) -> str:
    """The text of ports.hpp for a shim: set_inputs, get_outputs, set_clock and set_reset of exactly these ports.

    `names` are all ports of the design: `clk` and `rst` are absent where nothing is registered or reset.
    """

    def line(slot: int, port: Port, is_input: bool) -> str:
        array = f"{'in' if is_input else 'out'}[{slot}]"
        if port.width > 64:
            ends = [f"top.{port.member}.data()", f"static_cast<uint32_t*>({array}) + {port.words} * index"]
            target, source = ends if is_input else reversed(ends)
            return f"    std::memcpy({target}, {source}, {4 * port.words});"
        item = f"static_cast<uint{8 * port.dtype.itemsize}_t*>({array})[index]"
        return f"    top.{port.member} = {item};" if is_input else f"    {item} = top.{port.member};"

    def drive(function: str, port: str) -> str:
        body = f"top.{port} = value;" if port in names else "(void)top, (void)value;"
        return f"inline void {function}(Vtop& top, int value) {{ {body} }}"

    return "\n".join(
        [
            "#pragma once",
            "#include <cstdint>",
            "#include <cstring>",
            '#include "Vtop.h"',
            '#include "verilated.h"',
            "inline void set_inputs(Vtop& top, void* const* in, uint64_t index) {",
            *(line(slot, port, True) for slot, port in enumerate(inputs)),
            "}",
            "inline void get_outputs(Vtop& top, void* const* out, uint64_t index) {",
            *(line(slot, port, False) for slot, port in enumerate(outputs)),
            "}",
            drive("set_clock", "clk"),
            drive("set_reset", "rst"),
            "",
        ]
    )
