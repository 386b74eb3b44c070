"""Weight unit: from exact scores to weights, one (token, head) after the other, and their sums and maxima.

    i: scores of G heads ─► one head ─► ToLogit ─► ToWeight ─► p of G heads -> o_weight
                                                      └─► + l, max of (slot, head)

Timing: an item of i takes max(G, 4) cycles, unless `hold`; back-pressure: yes. A set's weights come LATENCY cycles
after its last head has left i.
Numerics: num.ToLogit, num.ToWeight; l exact.
"""

from amaranth import Array, Cat, Module, Mux, Signal
from amaranth.hdl import C, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.fixed_point import SCORE_BITS
from nearflash.gateware.attention.engine.beats import TICKET_BITS, TicketFault
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS, SLOT_BITS, ContextRecord, GatherWrite
from nearflash.gateware.attention.engine.lanes import weight_write
from nearflash.gateware.attention.numerics.logit import ToLogit
from nearflash.gateware.attention.numerics.product import OPERAND, fp16_operand
from nearflash.gateware.attention.numerics.weight import ToWeight
from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.stream.datapath import Datapath, Timed

__all__ = ["TOTAL", "WeightUnit", "score_set"]

_LEAST_CYCLES = 4  # of an item: a total is read and written back before it is read again
_WEIGHT_SUM_BITS = 58
_MAXIMUM_LEAST = -(1 << 11)
#: l in units of 2^-24, and the largest floor of the logits.
TOTAL = data.StructLayout({"sum": _WEIGHT_SUM_BITS, "maximum": signed(12)})


def score_set(heads: int) -> data.StructLayout:
    """Scores of one token for one set of heads; `last`: the token's last set."""
    return data.StructLayout(
        {
            "context": CONTEXT_BITS,
            "ticket": TICKET_BITS,
            "slot": SLOT_BITS,
            "turn": 3,
            "group": 4,
            "last": 1,
            "fresh": 1,
            "scores": data.ArrayLayout(signed(SCORE_BITS), heads),
        }
    )


class WeightUnit(wiring.Component):
    """exp2 of scores.

    Parameters: heads (G), contexts, slots.
    Members
    -------
    i_context : In, {valid, record}; i_gather : In, {valid, write}: broadcasts.
    i : In stream of score_set; `fresh`: the first token of its slot, whose totals are taken as empty.
    hold : In, take no head; busy : Out, some head is inside.
    total_address : In, slot·8 + head, looked at while nothing is inside; total : Out, TOTAL, a cycle later.
    o_weight : Out, weight_write, places in turn; o_token : Out, with it: all heads of a token are there.
    o_fault : Out, TicketFault of each cycle.
    """

    def __init__(self, heads: int, contexts: int, slots: int, weights: int) -> None:
        self._heads, self._contexts, self._slots, self._weights = heads, contexts, slots, weights
        super().__init__(
            {
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i_gather": In(data.StructLayout({"valid": 1, "write": GatherWrite})),
                "i": In(stream.Signature(score_set(heads))),
                "hold": In(1),
                "busy": Out(1),
                "total_address": In(9),
                "total": Out(TOTAL),
                "o_weight": Out(weight_write(heads)),
                "o_token": Out(1),
                "o_fault": Out(TicketFault),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Cycle 0: pick a head, look up. Then logit, weight, totals."""
        m = Module()
        path, i = Datapath(m), self.i.payload
        step = Signal(range(max(self._heads, _LEAST_CYCLES)))
        run = wire(m, self.i.valid & ~self.hold)
        valid = wire(m, run & (step < self._heads))
        m.d.comb += self.i.ready.eq(run & (step == max(self._heads, _LEAST_CYCLES) - 1))
        with m.If(run):
            m.d.sync += step.eq(Mux(self.i.ready, 0, step + 1))
        head = wire(m, (Cat(C(0, (self._heads - 1).bit_length()), i.turn) + step)[:4])
        scale, reference = self._constants(m, i.context, head[:3])
        score = Timed(register(m, Array(i.scores)[step]), 1)
        logit = path.call("logit", to_logit := ToLogit(), i=score, scale=scale)
        weight = path.call("weight", unit := ToWeight(), i=logit, reference=reference)
        end = weight.cycle
        at_end = {
            name: path.delay(Timed(value, 0), end)
            for name, value in {
                "valid": valid, "ticket": i.ticket, "last": i.last & (step == self._heads - 1), "fresh": i.fresh,
                "place": wire(m, step), "total": wire(m, Cat(head[:3], i.slot)),
                "counts": wire(m, head < i.group),
            }.items()
        }  # fmt: skip
        outside = path.delay(Timed(to_logit.outside, logit.cycle), end)
        faults = Mux(unit.over, Fault.REFERENCE_HIGH.value, 0) | Mux(outside, Fault.SCORE_RANGE.value, 0)
        m.d.comb += [
            self.o_fault.ticket.eq(at_end["ticket"]),
            # Heads that the group does not have are computed, too, and mean nothing.
            self.o_fault.faults.eq(Mux(at_end["valid"] & at_end["counts"], faults, 0)),
        ]
        self._collect(m, at_end, unit)
        self._total(m, at_end, unit)
        inside = Signal(range(end + 8))
        with m.If(run):
            m.d.sync += inside.eq(end + 7)
        with m.Elif(inside != 0):
            m.d.sync += inside.eq(inside - 1)
        m.d.comb += self.busy.eq(inside != 0)
        return m

    def _constants(self, m: Module, context: Value, head: Value) -> tuple[Timed, Timed]:
        """Scale and reference of the head, from cycle 1 on."""
        depth = max(2, self._contexts)
        m.submodules.scales = scales = Memory(shape=32, depth=depth, init=[])
        m.submodules.references = references = Memory(shape=GatherWrite, depth=depth, init=[])
        for memory, broadcast, value in (
            (scales, self.i_context, self.i_context.record.scale),
            (references, self.i_gather, self.i_gather.write),
        ):
            write = memory.write_port()
            context_written = (self.i_context.record if memory is scales else self.i_gather.write).context
            m.d.comb += [write.addr.eq(context_written), write.data.eq(value), write.en.eq(broadcast.valid)]
        scale, reference = scales.read_port(), references.read_port()
        m.d.comb += [scale.addr.eq(context), reference.addr.eq(context)]
        chosen = wire(m, Array(reference.data.references)[register(m, head)])
        return Timed(scale.data, 1), Timed(chosen.as_signed(), 1)

    def _collect(self, m: Module, item: dict[str, Value], unit: ToWeight) -> None:
        """The weights of a set leave together."""
        o, place, weight = self.o_weight, item["place"], fp16_operand(m, unit.o)
        address = Signal(10)
        last = wire(m, item["valid"] & (place == self._heads - 1))
        m.d.comb += [o.valid.eq(last), o.address.eq(address), self.o_token.eq(last & item["last"])]
        with m.If(last):
            m.d.sync += address.eq(Mux(address == self._weights - 1, 0, address + 1))
        for k in range(self._heads - 1):
            kept = Signal(OPERAND, name=f"weight_{k}", reset_less=True)
            with m.If(place == k):
                m.d.sync += kept.eq(weight)
            m.d.comb += o["values"][k].eq(kept)
        m.d.comb += o["values"][self._heads - 1].eq(weight)

    def _total(self, m: Module, item: dict[str, Value], unit: ToWeight) -> None:
        """l and maximum, two and three cycles after the weight."""
        m.submodules.totals = totals = Memory(shape=TOTAL, depth=self._slots * 8, init=[])
        write, read = totals.write_port(), totals.read_port()
        address, valid, fresh = (delay(m, item[name], 1) for name in ("total", "valid", "fresh"))
        # One read port: the drain reads only while nothing is under way (`busy`).
        m.d.comb += [read.addr.eq(Mux(self.busy, address, self.total_address)), self.total.eq(read.data)]
        # Cycle 0 and 1: p in units of 2^-24.
        fraction, field = unit.o[:10], unit.o[10:15]
        normal = wire(m, field.any())
        distance = wire(m, Mux(normal, field - 1, 0)[:5])
        near = register(m, (Cat(fraction, normal) << distance[:3])[:18])
        far = register(m, distance[3:])
        fixed = register(m, (near << Cat(C(0, 3), far))[:42])
        # Cycle 2: add, compare.
        empty, floor = register(m, fresh), delay(m, unit.floor, 2)
        largest = wire(m, Mux(empty, _MAXIMUM_LEAST, read.data.maximum).as_signed())
        total = Signal(TOTAL, reset_less=True)
        m.d.sync += [
            total.sum.eq(Mux(empty, 0, read.data.sum) + fixed),
            total.maximum.eq(Mux(floor > largest, floor, largest)),
        ]
        m.d.comb += [write.addr.eq(delay(m, address, 2)), write.data.eq(total), write.en.eq(delay(m, valid, 2))]
