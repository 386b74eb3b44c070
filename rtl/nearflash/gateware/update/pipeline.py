"""Update pipeline: W lanes side by side, with streams around them.

Contract: one group of W parameters in, one group out, in order; `last` travels with its group. Lanes of a final group
that hold no parameter compute something that nobody may use.

Timing: latency LATENCY cycles; one group a cycle; back-pressure: yes (results have a reserved place in a block RAM
queue, so the lanes never stop).
Numerics: those of `Lane`.
"""

from amaranth import Module, Mux, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.convert import ToNarrow
from nearflash.gateware.fp.raw import Unpack
from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.update.lane import PROGRAM, Lane, LaneInput, LaneOutput, LaneScalars

__all__ = ["UpdatePipeline", "input_group", "output_group", "weight_of"]

_OVERFLOWS = 0xFEFF
"""Exponent and upper mantissa of the finite fp32 numbers whose weight is infinite."""


def input_group(lanes: int) -> data.StructLayout:
    """Operands of `lanes` parameters; `last` marks a command's final group."""
    return data.StructLayout({"lanes": data.ArrayLayout(LaneInput, lanes), "last": 1})


def output_group(lanes: int, *, delta: bool = False) -> data.StructLayout:
    """Results of `lanes` parameters; `last` marks a command's final group. delta: with the copies of the old ones."""
    old = {"old": data.ArrayLayout(16, lanes)} if delta else {}
    return data.StructLayout({"lanes": data.ArrayLayout(LaneOutput, lanes), "last": 1, **old})


class UpdatePipeline(wiring.Component):
    """`lanes` update lanes between two streams.

    Parameters
    ----------
    lanes : parameters a cycle.
    delta : whether copies of the parameters as they were come out, too.
    masters : whether p may be a split master.

    Members
    -------
    i : In stream of `input_group`.
    program : In, PROGRAM bits; scalars : In, LaneScalars. Both must not change while groups are inside.
    o : Out stream of `output_group`.
    split : In, with `masters`: copies, and their overflows, are the weights of split masters.
    """

    def __init__(self, lanes: int, *, delta: bool = False, masters: bool = False) -> None:
        self.lanes, self.delta, self.masters = lanes, delta, masters
        results = output_group(lanes, delta=delta)
        self._lanes = [Lane() for _ in range(lanes)]
        self._credit = CreditPipeline(self._lanes[0].LATENCY, input_group(lanes), results, memory="block")
        #: Cycles from i to o when nothing stalls.
        self.LATENCY = self._credit.LATENCY
        super().__init__(
            {
                "i": In(stream.Signature(input_group(lanes))),
                "program": In(PROGRAM),
                "scalars": In(LaneScalars),
                "o": Out(stream.Signature(results)),
                **({"split": In(1)} if masters else {}),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Hang the lanes on the credit pipeline; only `last` is delayed beside them."""
        m = Module()
        m.submodules.credit = credit = self._credit
        wiring.connect(m, wiring.flipped(self.i), credit.i)
        wiring.connect(m, credit.o, wiring.flipped(self.o))
        for index, lane in enumerate(self._lanes):
            m.submodules[f"lane_{index}"] = lane
            m.d.comb += [
                lane.i.eq(credit.core_i.lanes[index]),
                lane.program.eq(self.program),
                lane.scalars.eq(self.scalars),
                credit.core_o.lanes[index].eq(lane.o),
            ]
        if self.delta:
            self._round_old(m)
        if self.masters:
            self._split(m)
        last = Datapath(m).delay(Timed(credit.core_i.last, 0), credit.core_latency)
        m.d.comb += credit.core_o.last.eq(last)
        return m

    def _round_old(self, m: Module) -> None:
        """Copies of the parameters as they come in, or their weights, beside the lanes."""
        path = Datapath(m)
        for index, old in enumerate(self._credit.core_o.old):
            p = path.call(f"unpack_old_{index}", Unpack(), i=Timed(self._credit.core_i.lanes[index].p, 0))
            copy = path.call(f"round_old_{index}", ToNarrow(), i=p, bf16=self.program.copy_format[1])
            if self.masters:
                weight = path.delay(Timed(weight_of(self._credit.core_i.lanes[index].p), 0), copy.cycle)
                copy = Timed(Mux(self.split, weight, copy.value), copy.cycle)
            m.d.comb += old.eq(path.delay(copy, self._credit.core_latency))

    def _split(self, m: Module) -> None:
        """Weights of the new parameters in the place of their copies. A NaN is the canonical one, which is a weight."""
        with m.If(self.split):
            for lane in self._credit.core_o.lanes:
                m.d.comb += [lane.copy.eq(weight_of(lane.p)), lane.copy_overflow.eq(lane.p[15:31] == _OVERFLOWS)]


def weight_of(p: Value) -> Value:
    """The weight of a split master: p rounded to bf16, ties away from zero; of one that was joined the one before."""
    return (p[16:] + p[15])[:16]
