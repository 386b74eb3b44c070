"""Free-running datapaths: units of fixed latency, chained, with the delays between them inserted by themselves.

A `Timed` value knows in which cycle it is there, counted from the datapath's input. `Datapath.call` brings a unit's
operands to the same cycle and gives its result `LATENCY` cycles later. Delay registers have no reset and no enable, so
synthesis turns them into shift-register LUTs.
"""

from typing import Any, NamedTuple

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data

__all__ = ["Datapath", "Timed", "select"]


class Timed(NamedTuple):
    """A value and the cycle in which it is there."""

    value: Any
    cycle: int


def select(condition: Value, if_true: Any, if_false: Any) -> Any:
    """`Mux` that keeps the layout of its operands."""
    picked = Mux(condition, Value.cast(if_true), Value.cast(if_false))
    return data.View(if_true.shape(), picked) if isinstance(if_true, data.View) else picked


class Datapath:
    """Adds units and delays to a module.

    Parameters
    ----------
    m : module that gets the units, under the names given to `call`.
    """

    def __init__(self, m: Module) -> None:
        self._m = m
        self._chains: dict[int, list[Any]] = {}

    def delay(self, timed: Timed, cycle: int) -> Any:
        """The value as it is in `cycle`; values asked for twice share their registers.

        Raises ValueError for a cycle before the value is there.
        """
        if cycle < timed.cycle:
            raise ValueError(f"cycle must be at least {timed.cycle}, when the value is there, not {cycle!r}")
        chain = self._chains.setdefault(id(timed.value), [timed.value])
        while len(chain) <= cycle - timed.cycle:
            register = Signal.like(chain[-1], name=f"delay_{len(chain)}", reset_less=True)
            self._m.d.sync += register.eq(chain[-1])
            chain.append(register)
        return chain[cycle - timed.cycle]

    def align(self, *values: Timed) -> tuple[list[Any], int]:
        """The values, all brought to the cycle of the latest, and that cycle."""
        cycle = max(value.cycle for value in values)
        return [self.delay(value, cycle) for value in values], cycle

    def call(self, name: str, unit: Any, **operands: Any) -> Timed:
        """Result (port `o`) of `unit` on the operands, by port name.

        A unit looks at its operands in its first cycle, or `unit.ARRIVAL[port]` cycles later where it says so.
        Operands that are not `Timed` do not change while the datapath works: they are connected as they are.
        """
        self._m.submodules[name] = unit
        arrival = getattr(unit, "ARRIVAL", {})
        timed = {port: operand for port, operand in operands.items() if isinstance(operand, Timed)}
        start = max(operand.cycle - arrival.get(port, 0) for port, operand in timed.items())
        for port, operand in operands.items():
            value = self.delay(operand, start + arrival.get(port, 0)) if port in timed else operand
            self._m.d.comb += getattr(unit, port).eq(value)
        return Timed(unit.o, start + unit.LATENCY)
