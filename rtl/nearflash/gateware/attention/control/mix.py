"""Output of a head: what its tokens say and what the mean of all values says, in the shares alpha and 1 - alpha.

    sum ─► ToRaw ─┬─► denominators[head]              v_mean[element] ─► Unpack ─┐
                  └─► Div ─┬─► alpha[head]                                       ▼
                           └─► Mul by alpha[head] ─────────────────────────► MulAdd ─┬─► ToNarrow ─► o
                                                        rest[head] ─► factor ──┘     └─► rest[head]

The shares of a head go through first, as quotients of their own: alpha is kept, and 1 - alpha is made by the same
multipliers, as fma(1, 1, -alpha).
"""

from typing import Any

from amaranth.hdl import Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import EXACT_LSB, PV_BITS
from nearflash.abi.formats import FP16
from nearflash.gateware.attention.engine.interfaces import HEAD_BITS
from nearflash.gateware.attention.numerics.raw import ToRaw
from nearflash.gateware.fp.convert import ToNarrow
from nearflash.gateware.fp.div import Div
from nearflash.gateware.fp.mul import Mul
from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import RAW, SIG_BITS, Unpack
from nearflash.gateware.stream.datapath import Datapath, Timed, select

__all__ = ["Mix", "MixTag"]

_HEADS = 1 << HEAD_BITS
_DIM_MAX = 256
_LEADING = 1 << SIG_BITS - 1
_ONE, _MINUS_ONE = RAW.const({"sig": _LEADING}), RAW.const({"sig": _LEADING, "sign": 1})
_MINUS_ZERO = RAW.const({"sign": 1, "zero": 1})


class MixTag(data.Struct):
    """Meaning of an integer."""

    denominator: 1
    """By which the numerators of its head, further items, are divided."""
    share: 1
    """A part of alpha; else of the output."""
    head: HEAD_BITS
    element: range(_DIM_MAX)
    """Of an output's numerator."""


class Mix(wiring.Component):
    """Outputs of a head from its exact sums.

    Contract: items come in this order: denominators of the shares, their numerators; when `busy` has fallen,
    denominators of the output (l), its numerators (N), for which v_mean must be there. Within each, any order.

    Timing: latency LATENCY cycles; one item a cycle; no back-pressure.
    Numerics: integers -> fp32 (RNE), o = fp16(fma(fl32(1 - alpha), v_mean, fl32(alpha * fl32(N / l)))), RNE, and
    fp16(fl32(N / l)) where alpha is 1; equals nearflash.model.attention.gather.finish to the bit.

    Members
    -------
    i : In, {sum (signed, PV_BITS), tag (MixTag)}. i_valid : In.
    mean : In, {valid, address (7), word (64)}: elements 2·address and 2·address + 1 of v_mean, fp32.
    o : Out, fp16. o_valid : Out.
    busy : Out, items are under way.
    """

    def __init__(self) -> None:
        self._units: dict[str, Any] = {
            "to_raw": ToRaw(signed(PV_BITS), EXACT_LSB), "quotient": Div(), "product": Mul(), "unpack": Unpack(),
            "mix": MulAdd(), "narrow": ToNarrow(),
        }  # fmt: skip
        #: Cycles from i to o.
        self.LATENCY = sum(unit.LATENCY for name, unit in self._units.items() if name != "unpack")
        super().__init__(
            {
                "i": In(data.StructLayout({"sum": signed(PV_BITS), "tag": MixTag})),
                "i_valid": In(1),
                "mean": In(data.StructLayout({"valid": 1, "address": 7, "word": 64})),
                "o": Out(FP16.bits),
                "o_valid": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """In dataflow order; `Datapath` inserts the delays."""
        m = Module()
        path, units = Datapath(m), self._units
        valid = Signal(self.LATENCY + 1)  # bit n: the item of n cycles ago
        m.d.comb += valid[0].eq(self.i_valid)
        m.d.sync += valid[1:].eq(valid)
        self._valid, self._tag = valid, Timed(self.i.tag, 0)

        raw = path.call("to_raw", units["to_raw"], i=Timed(self.i.sum, 0))
        tag = path.delay(self._tag, raw.cycle)
        divisor = self._table(m, "denominators", tag.head, raw.value, tag, valid[raw.cycle] & tag.denominator)
        quotient = path.call("quotient", units["quotient"], a=raw, b=Timed(divisor, raw.cycle))

        tag, is_share = self._share(path, quotient.cycle)
        alpha = self._table(m, "alpha", tag.head, quotient.value, tag, is_share)
        factor = select(tag.share, _MINUS_ONE, alpha)
        product = path.call("product", units["product"], a=quotient, b=Timed(factor, quotient.cycle))

        tag = path.delay(self._tag, product.cycle)
        late_tag, is_share = self._share(path, product.cycle + units["mix"].LATENCY)
        rest = self._table(m, "rest", tag.head, units["mix"].o, late_tag, is_share)
        mean = self._mean(m, path, product.cycle)
        mean = select(
            tag.share, _ONE, select(rest.zero, _MINUS_ZERO, mean)
        )  # fma(-0, 0, x) is x, also where that is -0
        rest = select(tag.share, _ONE, rest)
        mixed = path.call(
            "mix", units["mix"], a=Timed(mean, product.cycle), b=Timed(rest, product.cycle), c=product, fused=1
        )
        narrow = path.call("narrow", units["narrow"], i=mixed, bf16=0)
        tag = path.delay(self._tag, narrow.cycle)
        m.d.comb += [
            self.o.eq(narrow.value),
            self.o_valid.eq(valid[narrow.cycle] & ~tag.share & ~tag.denominator),
            self.busy.eq(valid[1:].any()),
        ]
        return m

    def _share(self, path: Datapath, cycle: int) -> tuple[Any, Value]:
        """The tag in `cycle`, and whether there is the numerator of a share."""
        tag = path.delay(self._tag, cycle)
        return tag, self._valid[cycle] & tag.share & ~tag.denominator

    def _table(self, m: Module, name: str, head: Value, value: Any, tag: Any, write: Value) -> data.View:
        """The entry of `head` in a table of one RAW a head; `value` goes to that of `tag` in cycles with `write`."""
        m.submodules[name] = memory = Memory(shape=RAW, depth=_HEADS, init=[])
        read, port = memory.read_port(domain="comb"), memory.write_port()
        m.d.comb += [read.addr.eq(head), port.addr.eq(tag.head), port.data.eq(value), port.en.eq(write)]
        return read.data

    def _mean(self, m: Module, path: Datapath, cycle: int) -> Any:
        """v_mean of the item's element, unpacked, in `cycle`."""
        m.submodules.means = memory = Memory(shape=64, depth=_DIM_MAX // 2, init=[])
        read, write = memory.read_port(), memory.write_port()
        asked = cycle - self._units["unpack"].LATENCY - 1
        m.d.comb += [
            write.addr.eq(self.mean.address),
            write.data.eq(self.mean.word),
            write.en.eq(self.mean.valid),
            read.addr.eq(path.delay(self._tag, asked).element[1:]),
        ]
        odd = path.delay(self._tag, asked + 1).element[0]
        word = Timed(Mux(odd, read.data[32:], read.data[:32]), asked + 1)
        return path.call("unpack", self._units["unpack"], i=word).value
