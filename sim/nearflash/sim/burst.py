"""A fixed-latency datapath, Verilated, fed one vector a clock with a whole burst per call.

For components without handshake: plain In and Out members and a `LATENCY` attribute (cycles from an input to the
output it causes; 0 is combinational). Several million vectors a second for a small unit.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.sim.build import build_library
from nearflash.sim.verilog import Port, convert

__all__ = ["BurstUnit", "integers_from_words", "words_from_integers"]

_SHIM = Path(__file__).parent / "shims" / "burst.cpp"


class BurstUnit:
    """`component` as a library; `name` names the library in the build cache.

    Ports up to 64 bits are arrays of shape (n,); wider ones are (n, words) of uint32, low word first. A scalar input
    is held for the whole burst. Outputs have the port's signedness and the smallest integer type that holds it.

    Raises ValueError for a component without LATENCY, BuildError (see nearflash.sim.build) where a tool fails.
    """

    def __init__(self, component: Any, name: str) -> None:
        if not hasattr(component, "LATENCY"):
            raise ValueError(f"{type(component).__name__} must have a LATENCY attribute, not none")
        self.stated_latency: int = component.LATENCY
        design = convert(component)
        data = [port for port in design.ports if port.name not in ("clk", "rst")]
        self.inputs = {port.name: port for port in data if port.is_input}
        self.outputs = {port.name: port for port in data if not port.is_input}
        header = _ports_header(tuple(self.inputs.values()), tuple(self.outputs.values()), design.port_names())
        path = build_library(component, name=name, shim=_SHIM, headers={"ports.hpp": header}, design=design)
        self._library = ctypes.CDLL(str(path))
        self._library.unit_new.restype = ctypes.c_void_p
        self._unit = ctypes.c_void_p(self._library.unit_new())

    def __del__(self) -> None:
        if hasattr(self, "_unit"):
            self._library.unit_free(self._unit)

    def reset(self) -> None:
        """Hold the reset for two cycles, then release it."""
        self._library.unit_reset(self._unit)

    def run(self, inputs: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
        """Feed one vector a clock; row k of every output is what vector k caused, LATENCY cycles later.

        Raises ValueError for a missing or unknown port, a wrong shape, or a value that does not fit its port.
        """
        return self._run(inputs, self.stated_latency)

    def latency(self, seed: int = 0, longest_cycles: int = 256) -> int:
        """Measure the cycles from an input to the output it changes, with random steps after a settled input.

        Raises ValueError where no output reacts within `longest_cycles`, or where outputs differ in latency.
        """
        found: dict[str, int] = {}
        rng = np.random.default_rng(seed)
        for _ in range(64):
            before, after = (_random_vector(rng, self.inputs) for _ in range(2))
            steps = np.arange(2 * longest_cycles) >= longest_cycles
            vectors = {
                name: np.where(steps if before[name].ndim == 0 else steps[:, None], after[name], before[name])
                for name in self.inputs
            }
            for name, trace in self._run(vectors, 0).items():
                changed = (trace[longest_cycles:] != trace[longest_cycles - 1]).reshape(longest_cycles, -1).any(axis=1)
                if changed.any():
                    found[name] = min(found.get(name, longest_cycles), int(changed.argmax()))
        if len(set(found.values())) != 1:
            raise ValueError(f"all outputs must react after the same number of cycles, not {found}")
        return next(iter(found.values()))

    def _run(self, inputs: Mapping[str, ArrayLike], latency: int) -> dict[str, NDArray[Any]]:
        if set(inputs) != set(self.inputs):
            raise ValueError(f"inputs must be {sorted(self.inputs)}, not {sorted(inputs)}")
        count = max(_rows(port, inputs[name]) for name, port in self.inputs.items())
        fed = [_checked(port, inputs[name], count) for name, port in self.inputs.items()]
        shapes = {name: (count,) if port.width <= 64 else (count, port.words) for name, port in self.outputs.items()}
        results = {name: np.empty(shapes[name], port.dtype) for name, port in self.outputs.items()}
        self._library.unit_run(
            self._unit,
            _pointers(fed),
            _pointers(list(results.values())),
            ctypes.c_uint64(count),
            ctypes.c_uint64(latency),
        )
        for name, port in self.outputs.items():
            if port.signed and port.width <= 64:  # Verilator leaves the bits above the port's width zero
                spare = port.dtype.type(8 * port.dtype.itemsize - port.width)
                results[name] = (results[name] << spare) >> spare
        return results


def words_from_integers(values: Sequence[int], width: int) -> NDArray[np.uint32]:
    """Python integers (signed or not) as rows of uint32 words, low first, for a port of `width` > 64 bits."""
    words, mask = -(-width // 32), (1 << width) - 1
    text = b"".join((int(value) & mask).to_bytes(4 * words, "little") for value in values)
    return np.frombuffer(text, np.dtype("<u4")).reshape(-1, words).astype(np.uint32)


def integers_from_words(words: NDArray[np.uint32], width: int | None = None) -> list[int]:
    """Rows of uint32 words, low first, as Python integers; signed two's complement where `width` is given."""
    values = [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in words]
    return values if width is None else [value - (1 << width) * (value >> (width - 1)) for value in values]


def _rows(port: Port, value: ArrayLike) -> int:
    shape = np.shape(value)
    return 1 if len(shape) == (port.width > 64) else shape[0]


def _checked(port: Port, value: ArrayLike, count: int) -> NDArray[Any]:
    """`value` as a contiguous array of `count` rows in Verilator's layout: bits above the port's width are zero."""
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


def _pointers(arrays: Sequence[NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def _random_vector(rng: np.random.Generator, ports: Mapping[str, Port]) -> dict[str, NDArray[Any]]:
    vector = {}
    for name, port in ports.items():
        value = int.from_bytes(rng.bytes(4 * -(-port.width // 32)), "little") % (1 << port.width)
        if port.width > 64:
            vector[name] = words_from_integers([value], port.width)[0]
        else:
            signed_value = value - (1 << port.width) * (value >> (port.width - 1)) if port.signed else value
            vector[name] = np.array(signed_value, port.dtype)
    return vector


def _ports_header(inputs: Sequence[Port], outputs: Sequence[Port], names: frozenset[str]) -> str:
    """The C++ accessors of exactly these ports; `clk` and `rst` are absent where nothing is registered or reset."""

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
