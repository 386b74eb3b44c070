"""Update pipeline: W lanes side by side, with streams around them.

Contract: one group of W parameters in, one group out, in order; `last` travels with its group. Lanes of a final group
that hold no parameter compute something that nobody may use.

Timing: latency LATENCY cycles; one group a cycle; back-pressure: yes (results have a reserved place in a block RAM
queue, so the lanes never stop).
Numerics: those of `Lane`.
"""

from amaranth import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.update.lane import PROGRAM, Lane, LaneInput, LaneOutput, LaneScalars

__all__ = ["UpdatePipeline", "input_group", "output_group"]


def input_group(lanes: int) -> data.StructLayout:
    """Operands of `lanes` parameters; `last` marks a command's final group."""
    return data.StructLayout({"lanes": data.ArrayLayout(LaneInput, lanes), "last": 1})


def output_group(lanes: int) -> data.StructLayout:
    """Results of `lanes` parameters; `last` marks a command's final group."""
    return data.StructLayout({"lanes": data.ArrayLayout(LaneOutput, lanes), "last": 1})


class UpdatePipeline(wiring.Component):
    """`lanes` update lanes between two streams.

    Parameters
    ----------
    lanes : parameters a cycle.

    Members
    -------
    i : In stream of `input_group`.
    program : In, PROGRAM bits; scalars : In, LaneScalars. Both must not change while groups are inside.
    o : Out stream of `output_group`.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._lanes = [Lane() for _ in range(lanes)]
        self._credit = CreditPipeline(self._lanes[0].LATENCY, input_group(lanes), output_group(lanes), memory="block")
        #: Cycles from i to o when nothing stalls.
        self.LATENCY = self._credit.LATENCY
        super().__init__(
            {
                "i": In(stream.Signature(input_group(lanes))),
                "program": In(PROGRAM),
                "scalars": In(LaneScalars),
                "o": Out(stream.Signature(output_group(lanes))),
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
        last = Datapath(m).delay(Timed(credit.core_i.last, 0), credit.core_latency)
        m.d.comb += credit.core_o.last.eq(last)
        return m
