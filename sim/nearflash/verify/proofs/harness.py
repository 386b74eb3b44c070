"""A proof harness: the component under proof, what its surroundings may do, and what must always hold.

The reset is free: it may come at any time, and takes the harness's own registers with it. So an environment that only
holds back after a reset is not needed, and every property covers runs with a reset in the middle.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from amaranth.back import rtlil
from amaranth.hdl import Assert, Assume, Cover, Module, ResetSignal, ShapeLike, Signal, Value

__all__ = ["ProofHarness"]

_CHECK = re.compile(r'cell \$check \S+\n(\s+parameter \\FORMAT "(\w+)")')


@dataclass
class ProofHarness:
    """Collects inputs, assumptions and properties around `dut`, and converts the whole to RTLIL.

    A property's name becomes the name of its cell, which is what the solver reports when it fails.
    """

    dut: Any
    #: Pairs of signals (from, to): no combinational path may lead from the first to the second.
    no_paths: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.m = Module()
        self.m.submodules.dut = self.dut
        self.properties: list[str] = []
        self.covers: list[str] = []
        #: ProofHarness signal -> hierarchical name of the signal inside `dut` that it is tied to.
        self.probes: dict[str, str] = {}
        self._inputs: list[Signal] = []
        self.was_reset = Signal(init=1, reset_less=True)
        self.m.d.sync += self.was_reset.eq(ResetSignal())

    def free(self, shape: ShapeLike, name: str) -> Any:
        """An input of the solver's choice in every cycle."""
        signal = Signal(shape, name=name)
        self._inputs.append(signal)
        return signal

    def past(self, value: Any, name: str) -> Any:
        """`value` of the cycle before; zero after a reset."""
        register = Signal(Value.cast(value).shape(), name=name)
        self.m.d.sync += register.eq(value)
        return register

    def probe(self, path: str, shape: ShapeLike) -> Any:
        """The signal `path` inside the component ("split.left_beats"), for invariants that make a proof inductive."""
        signal = self.free(shape, "probe_" + path.replace(".", "_"))
        self.probes[signal.name] = f"dut.{path}"
        return signal

    def assume(self, condition: Any) -> None:
        """The surroundings keep to `condition` in every cycle."""
        self.m.d.comb += Assume(condition)

    def prove(self, name: str, condition: Any) -> None:
        """`condition` holds in every cycle that can be reached."""
        self.properties.append(name)
        self.m.d.comb += Assert(condition, name)

    def cover(self, name: str, condition: Any) -> None:
        """`condition` can be reached: shows that the assumptions leave room for what matters."""
        self.covers.append(name)
        self.m.d.comb += Cover(condition, name)

    def rtlil(self) -> str:
        """RTLIL text, each check's cell named after its property."""
        text = rtlil.convert(self.m, name="top", ports=self._inputs, emit_src=False)
        return _CHECK.sub(r"cell $check \\\2\n\1", text)
