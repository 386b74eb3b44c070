"""A component with streams, Verilated, with whole bursts per call: `harness.run_streams` at millions of cycles/s.

Payloads are raw bits: arrays of integers up to 64 bits, (n, words) of uint32 above (see nearflash.sim.verilator.ports).
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.sim.stalls import SimulationTimeout, Stall, StallPattern, UnexpectedItems, find_stalls, waiting_text
from nearflash.sim.verilator.build import build_library
from nearflash.sim.verilator.ports import accessors, pointers, row_count, sign_extended, to_words
from nearflash.sim.verilog import Design, Port, convert

__all__ = ["Devices", "StreamUnit"]

_SHIM = Path(__file__).parents[1] / "shims" / "streams.cpp"


_NO_DEVICES = """#pragma once
struct Devices {
    void drive(Vtop&) {}
    void sample(Vtop&) {}
    void reset() {}
    void* at(int) { return nullptr; }
};
"""


@dataclass(frozen=True)
class Devices:
    """Models behind streams: the text that defines the C++ class Devices, and the names of those streams."""

    header: str = _NO_DEVICES
    streams: tuple[str, ...] = ()


class _End(ctypes.Structure):
    """Mirrors `End` in streams.cpp."""

    _fields_ = [("items", ctypes.c_void_p)] + [
        (name, ctypes.c_uint64) for name in ("count", "moved", "chance_after_run", "chance_after_stall", "stalled")
    ]

    @classmethod
    def of(cls, items: NDArray[Any], stall: Stall) -> "_End":
        chances = (round(chance * (1 << 32)) for chance in stall.chances)
        return cls(items.ctypes.data, len(items), 0, *chances, 0)


class StreamUnit:
    """`component`, or a converted design, as a library; `name` names the library in the build cache.

    Streams are named by their path joined with a double underscore, at most 32 inputs. Other inputs are held for a
    whole run; other outputs are not seen. `devices` gives models that sit behind some of the streams instead.

    Raises BuildError (see nearflash.sim.verilator.build) where a tool fails.
    """

    def __init__(self, component: Any, name: str, devices: Callable[[Design], "Devices"] | None = None) -> None:
        design = component if isinstance(component, Design) else convert(component)
        found = devices(design) if devices else Devices()
        ports = {port.name: port for port in design.ports}
        streams = {
            stream: ports[f"{stream}__payload"]
            for stream in (path.removesuffix("__payload") for path in ports if path.endswith("__payload"))
            if f"{stream}__valid" in ports and f"{stream}__ready" in ports and stream not in found.streams
        }
        self.sources = {stream: port for stream, port in streams.items() if port.is_input}
        self.sinks = {stream: port for stream, port in streams.items() if not port.is_input}
        taken = {*streams, *found.streams}
        members = {f"{stream}__{part}" for stream in taken for part in ("payload", "valid", "ready")}
        free = [port for port in design.ports if port.is_input and port.name not in {*members, "clk", "rst"}]
        self.held = {port.name: port for port in free}
        headers = {
            "ports.hpp": accessors(free, (), design.port_names()),
            "streams.hpp": _visitor("each_source", self.sources) + _visitor("each_sink", self.sinks),
            "devices.hpp": found.header,
        }
        path = build_library(design, name=name, shim=_SHIM, headers=headers, brief=True)
        self._library = ctypes.CDLL(str(path))
        self._library.unit_new.restype = ctypes.c_void_p
        self._library.unit_run.restype = ctypes.c_uint64
        self._library.unit_device.restype = ctypes.c_void_p
        self._unit = ctypes.c_void_p(self._library.unit_new())
        #: Cycles of the last run, the quiet ones at its end included.
        self.cycles = 0

    def __del__(self) -> None:
        if hasattr(self, "_unit"):
            self._library.unit_free(self._unit)

    def reset_model(self) -> None:
        """Begin with a new model: memories, and registers without reset, are as at its construction, zero."""
        self._library.unit_free(self._unit)
        self._unit = ctypes.c_void_p(self._library.unit_new())

    def device(self, index: int) -> int:
        """Address of model `index`."""
        return int(self._library.unit_device(self._unit, index))

    def run(
        self,
        inputs: Mapping[str, ArrayLike],
        outputs: Mapping[str, int],
        *,
        stalls: str | StallPattern = "none",
        seed: int = 0,
        hold: Mapping[str, ArrayLike] | None = None,
        timeout_cycles: int | None = None,
        quiet_cycles: int = 16,
    ) -> dict[str, NDArray[Any]]:
        """Reset, send `inputs`, wait for `outputs` items of each output stream, and return them by stream.

        After the last item the simulation runs on for `quiet_cycles`. `hold` gives inputs that belong to no stream (0
        where not named); `timeout_cycles` is by default 1000 and 200 for each item of the longest stream.

        Raises SimulationTimeout that names the waiting streams, UnexpectedItems for an item too many, ValueError for
        unknown streams or values that do not fit.
        """
        for kind, given, known in (
            ("input streams", inputs, self.sources),
            ("output streams", outputs, self.sinks),
            ("held inputs", hold or {}, self.held),
        ):
            if not set(given) <= set(known):
                raise ValueError(f"{kind} must be among {sorted(known)}, not {sorted(given)}")
        pattern = find_stalls(stalls)
        fed = {name: _rows(port, inputs.get(name, ())) for name, port in self.sources.items()}
        results = {name: _empty(port, outputs.get(name, 0)) for name, port in self.sinks.items()}
        sources, sinks = (
            (_End * len(arrays))(*(_End.of(array, pattern.of(name, is_source=fills)) for name, array in arrays.items()))
            for arrays, fills in ((fed, True), (results, False))
        )
        held = [to_words(port, (hold or {}).get(name, _zero(port)), 1) for name, port in self.held.items()]
        longest = max((end.count for end in (*sources, *sinks)), default=0)
        limit = 1000 + 200 * longest if timeout_cycles is None else timeout_cycles
        numbers = (ctypes.c_uint64(number) for number in (limit + quiet_cycles, quiet_cycles, seed))
        self.cycles = self._library.unit_run(self._unit, sources, sinks, pointers(held), *numbers)
        progress = [
            [(name, end.moved, end.count) for name, end in zip(names, ends, strict=True)]
            for names, ends in ((fed, sources), (results, sinks))
        ]
        if any(moved < count for side in progress for _, moved, count in side):
            raise SimulationTimeout(waiting_text(limit, *progress))
        for name, moved, count in progress[1]:
            if moved > count:
                raise UnexpectedItems(f"{name} must give {count} items, not {moved}")
        return {name: sign_extended(port, results[name]) for name, port in self.sinks.items()}


def _visitor(function: str, streams: Mapping[str, Port]) -> str:
    """A C++ function template that calls `f` for each stream, unrolled, with the payload's size a constant."""
    lines = [f"template <class F> inline void {function}(Vtop& top, F&& f) {{", "    (void)top, (void)f;"]
    for slot, port in enumerate(streams.values()):
        stem = port.member.removesuffix("payload")
        size = port.words * port.dtype.itemsize
        payload = f"Payload<{size}>{{reinterpret_cast<uint8_t*>(&top.{port.member})}}"
        lines.append(f"    f({slot}, top.{stem}valid, top.{stem}ready, {payload});")
    return "\n".join([*lines, "}", ""])


def _rows(port: Port, values: ArrayLike) -> NDArray[Any]:
    if np.size(values) == 0:
        return _empty(port, 0)
    return to_words(port, values, row_count(port, values))


def _empty(port: Port, count: int) -> NDArray[Any]:
    return np.empty((count,) if port.width <= 64 else (count, port.words), port.dtype)


def _zero(port: Port) -> NDArray[Any]:
    return np.zeros(() if port.width <= 64 else port.words, port.dtype)
