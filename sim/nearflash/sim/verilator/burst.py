"""A fixed-latency datapath, Verilated, fed one vector a clock with a whole burst per call.

For components without handshake: plain In and Out members and a `LATENCY` attribute (cycles from an input to the
output it causes; 0 is combinational). Several million vectors a second for a small unit.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.sim.verilator.build import build_library
from nearflash.sim.verilator.ports import accessors, pointers, row_count, sign_extended, to_words, words_from_integers
from nearflash.sim.verilog import Design, Port, convert

__all__ = ["BurstUnit"]

_SHIM = Path(__file__).parents[1] / "shims" / "burst.cpp"


class BurstUnit:
    """`component`, or a converted design, as a library; `name` names the library in the build cache.

    Ports up to 64 bits are arrays of shape (n,); wider ones are (n, words) of uint32, low word first. A scalar input
    is held for the whole burst. Outputs have the port's signedness and the smallest integer type that holds it.

    Raises ValueError for a component without LATENCY, BuildError (see nearflash.sim.verilator.build) where a tool
    fails.
    """

    def __init__(self, component: Any, name: str, *, batch: bool = False) -> None:
        if not hasattr(component, "LATENCY"):
            raise ValueError(f"{type(component).__name__} must have a LATENCY attribute, not none")
        self.stated_latency: int = component.LATENCY
        design = component if isinstance(component, Design) else convert(component)
        #: Of the design: what the library was built from.
        self.digest: str = design.digest
        data = [port for port in design.ports if port.name not in ("clk", "rst")]
        self.inputs = {port.name: port for port in data if port.is_input}
        self.outputs = {port.name: port for port in data if not port.is_input}
        header = accessors(tuple(self.inputs.values()), tuple(self.outputs.values()), design.port_names())
        path = build_library(design, name=name, shim=_SHIM, headers={"ports.hpp": header}, batch=batch, brief=True)
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
        count = max(row_count(port, inputs[name]) for name, port in self.inputs.items())
        fed = [to_words(port, inputs[name], count) for name, port in self.inputs.items()]
        shapes = {name: (count,) if port.width <= 64 else (count, port.words) for name, port in self.outputs.items()}
        results = {name: np.empty(shapes[name], port.dtype) for name, port in self.outputs.items()}
        self._library.unit_run(
            self._unit,
            pointers(fed),
            pointers(list(results.values())),
            ctypes.c_uint64(count),
            ctypes.c_uint64(latency),
        )
        return {name: sign_extended(port, results[name]) for name, port in self.outputs.items()}


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
