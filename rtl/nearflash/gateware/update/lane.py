"""One lane of the update: one parameter a cycle, of Adam, AdamW, SGD, AdaGrad or Lion.

            g ──┬────────────► decay ─► g ─┬─► (g - m) ─► AXPBY ─► m' ─► · pre_scale ──┐
            p ──┴─ (MulAdd) ─► p1 ──────┐  └─► (· g or · v_gain) ─► AXPBY ─► v' ─┐      ▼
                                        │             denominator: √v'·factor + eps ─► ÷
                                        └────────────────────────────────► MulAdd · post_scale ─► p'

Which rule and operation order this computes is set by run-time bits and scalars (abi.program); the division of √v' by
a scalar is a product with its 51-bit reciprocal, rounded once, which equals the division. What the quotient is instead,
by `direction`:

    MOMENT     m' / 1                          SGD
    LOOKAHEAD  (m'·factor + g) / 1             SGD with Nesterov: the denominator's unit is free then
    SIGN       sign of v' / 1                  Lion: v' is b1·m + c1·g, the other average of m

Timing: latency LATENCY cycles; one parameter a cycle; free-running, no back-pressure.
Numerics: fp32, subnormals kept, RNE; equals nearflash.model.update.lane to the bit for the named profiles.
Limits: scalars must be zero or normal fp32 numbers (nearflash.abi.optimizers refuses others).
Source: Kingma & Ba 2015; Chen et al. 2023; Smart-Infinity (HPCA'24), section V; docs/contracts/numerics.md.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.fields import Register
from nearflash.abi.optimizers.program import DecayMode, Direction
from nearflash.abi.registers import FACTOR_BITS, UPDATE
from nearflash.gateware.fp.add import Add
from nearflash.gateware.fp.convert import ToNarrow
from nearflash.gateware.fp.div import Div
from nearflash.gateware.fp.mul import Mul
from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import EXP_ZERO, RAW, Pack, RawLayout, Unpack
from nearflash.gateware.fp.sqrt import Sqrt
from nearflash.gateware.stream.datapath import Datapath, Timed, select
from nearflash.gateware.update.axpby import Axpby

__all__ = ["PROGRAM", "Lane", "LaneInput", "LaneOutput", "LaneScalars"]


def _program_layout(register: Register) -> data.StructLayout:
    return data.StructLayout({field.name: field.width for field in register.fields})


PROGRAM = _program_layout(UPDATE["program"])
"""Run-time bits of the operation order, as in register `program`."""


class LaneInput(data.Struct):
    """fp32 bit patterns of one parameter's gradient and state."""

    g: 32
    p: 32
    m: 32
    v: 32


class LaneOutput(data.Struct):
    """fp32 bit patterns of the new state, and what is to be counted."""

    p: 32
    m: 32
    v: 32
    copy: 16
    nonfinite_gradient: 1
    copy_overflow: 1


class LaneScalars(data.Struct):
    """Scalars that are the same for all parameters of a command, unpacked."""

    decay: RAW
    m_decay: RAW
    m_gain: RAW
    v_decay: RAW
    v_gain: RAW
    eps: RAW
    pre_scale: RAW
    post_scale: RAW
    denominator_factor: RawLayout(FACTOR_BITS)


class _Chosen(data.Struct):
    """Choices of the program's fields, in registers: behind them operands pass through it and a unit's first stage."""

    decay_gradient: 1
    decay_scale: 1
    ratio: 1
    lookahead: 1
    sign: 1


ONE = RAW.const({"sig": 1 << 23})


def _sign(raw: Any) -> Any:
    """-1, +0, 1 or NaN."""
    sig, exp = Cat(C(0, 23), ~raw.zero), Mux(raw.zero, EXP_ZERO, 0)
    return data.View(RAW, Cat(sig, Cat(exp)[:10], raw.sign & ~raw.zero, raw.zero, C(0, 1), raw.nan))


def _negate(raw: Any) -> Any:
    return data.View(RAW, raw.as_value() ^ (1 << RAW["sign"].offset))


class Lane(wiring.Component):
    """Update datapath for one parameter a cycle.

    Members
    -------
    i : In, LaneInput.
    program : In, PROGRAM bits; scalars : In, LaneScalars. Both must not change while parameters are inside, `program`
        not in the cycle before the first one either.
    o : Out, LaneOutput of the `i` of LATENCY cycles ago.
    """

    i: In(LaneInput)
    program: In(PROGRAM)
    scalars: In(LaneScalars)
    o: Out(LaneOutput)

    #: Inputs that do not change while parameters are inside: simulators may take all else for a function of `i`.
    HELD_INPUTS = ("program", "scalars")

    def __init__(self) -> None:
        self._units: dict[str, Any] = {
            **{f"unpack_{name}": Unpack() for name in ("g", "p", "m", "v")},
            "decay": MulAdd(), "difference": Add(), "first_moment": Axpby(), "product": Mul(), "second_moment": Axpby(),
            "root": Sqrt(), "denominator": MulAdd(FACTOR_BITS), "numerator": Mul(), "quotient": Div(),
            "parameter": MulAdd(), **{f"pack_{name}": Pack() for name in ("p", "m", "v")}, "copy": ToNarrow(),
        }  # fmt: skip
        units = self._units
        longest = ("unpack_g", "decay", "product", "second_moment", "root", "denominator", "quotient", "parameter")
        #: Cycles from i to o, along the longest way: gradient, second moment, root, quotient, parameter.
        self.LATENCY = (
            sum(units[name].LATENCY for name in longest)
            - units["second_moment"].ARRIVAL["b"]
            + max(units[name].LATENCY for name in ("pack_p", "copy"))
        )
        self._chosen = Signal(_Chosen)
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        """In dataflow order; `Datapath` inserts the delays."""
        m = Module()
        path = Datapath(m)
        mode, direction, chosen = self.program.decay_mode, self.program.direction, self._chosen
        m.d.sync += [
            chosen.decay_gradient.eq(mode == DecayMode.GRADIENT),
            chosen.decay_scale.eq(mode == DecayMode.SCALE),
            chosen.ratio.eq(direction == Direction.RATIO),
            chosen.lookahead.eq(direction == Direction.LOOKAHEAD),
            chosen.sign.eq(direction == Direction.SIGN),
        ]
        g, p, exp_avg, exp_avg_sq = (
            self._call(path, f"unpack_{name}", i=Timed(self.i[name], 0)) for name in ("g", "p", "m", "v")
        )
        g, p = self._decay(path, g, p)
        # Lion's other average takes the place of v.
        second = Timed(select(self._chosen.sign, exp_avg.value, exp_avg_sq.value), exp_avg.cycle)
        exp_avg = self._first_moment(path, g, exp_avg)
        exp_avg_sq = self._second_moment(path, g, second)
        p = self._parameter(path, g, p, exp_avg, exp_avg_sq)

        results = {
            "p": self._call(path, "pack_p", i=p),
            "m": self._call(path, "pack_m", i=exp_avg),
            "v": self._call(path, "pack_v", i=exp_avg_sq),
            "copy": self._call(path, "copy", i=p, bf16=self.program.copy_format[1]),
            "nonfinite_gradient": Timed(self.i.g[23:31].all(), 0),
        }
        results["copy_overflow"] = Timed(self._units["copy"].flags.overflow, results["copy"].cycle)
        for name, result in results.items():
            m.d.comb += self.o[name].eq(path.delay(result, self.LATENCY))
        return m

    def _call(self, path: Datapath, name: str, **operands: Any) -> Timed:
        return path.call(name, self._units[name], **operands)

    def _decay(self, path: Datapath, g: Timed, p: Timed) -> tuple[Timed, Timed]:
        """Weight decay: on the parameter (AdamW) or into the gradient (L2)."""
        # Adding -0 changes nothing, not even a -0: +0 would turn it into +0.
        minus_zero = RAW.const({"sign": 1, "zero": 1})
        addend = select(self._chosen.decay_gradient, g.value, p.value)
        addend = select(self._chosen.decay_scale, minus_zero, addend)
        addend = Timed(addend, p.cycle)
        result = self._call(path, "decay", a=p, b=self.scalars.decay, c=addend, fused=self.program.decay_fused)
        late_g, late_p = path.delay(g, result.cycle), path.delay(p, result.cycle)
        return (
            Timed(select(self._chosen.decay_gradient, result.value, late_g), result.cycle),
            Timed(select(self._chosen.decay_gradient, late_p, result.value), result.cycle),
        )

    def _first_moment(self, path: Datapath, g: Timed, exp_avg: Timed) -> Timed:
        """m' = m_decay·m + m_gain·(g or g - m)."""
        (late_g, late_m), cycle = path.align(g, exp_avg)
        difference = self._call(path, "difference", a=Timed(late_g, cycle), b=Timed(_negate(late_m), cycle))
        factor = select(self.program.m_difference, difference.value, path.delay(g, difference.cycle))
        return self._call(
            path, "first_moment", a=self.scalars.m_decay, x=exp_avg, b=self.scalars.m_gain,
            y=Timed(factor, difference.cycle), fused=self.program.m_fused,
        )  # fmt: skip

    def _second_moment(self, path: Datapath, g: Timed, exp_avg_sq: Timed) -> Timed:
        """v' = v_decay·v + (v_gain·g)·g or + (g·g)·v_gain or, for a sign, + g·v_gain."""
        square_first, gain = self.program.v_square_first, self.scalars.v_gain
        factor = select(square_first, g.value, gain)
        # A multiplication by one is exact: the product passes g on to Lion's average.
        factor = select(self._chosen.sign, ONE, factor)
        product = self._call(path, "product", a=g, b=Timed(factor, g.cycle))
        late_g = path.delay(g, product.cycle)
        return self._call(
            path, "second_moment", a=self.scalars.v_decay, x=exp_avg_sq, b=product,
            y=Timed(select(square_first, gain, late_g), product.cycle), fused=self.program.v_fused,
        )  # fmt: skip

    def _parameter(self, path: Datapath, g: Timed, p: Timed, exp_avg: Timed, exp_avg_sq: Timed) -> Timed:
        """p' = p + post_scale·(pre_scale·m' / (factor·sqrt(v') + eps)), or another quotient, by `direction`."""
        scalars, lookahead = self.scalars, self._chosen.lookahead
        root = self._call(path, "root", a=exp_avg_sq)
        late_g, late_m, late_v = (path.delay(x, root.cycle) for x in (g, exp_avg, exp_avg_sq))
        denominator = self._call(
            path, "denominator", a=Timed(select(lookahead, late_m, root.value), root.cycle),
            b=scalars.denominator_factor, c=Timed(select(lookahead, late_g, scalars.eps), root.cycle),
            fused=self.program.denominator_fused,
        )  # fmt: skip
        moment = Timed(select(self._chosen.sign, _sign(late_v), late_m), root.cycle)
        numerator = self._call(path, "numerator", a=moment, b=scalars.pre_scale)
        dividend = select(lookahead, denominator.value, path.delay(numerator, denominator.cycle))
        # Rules without a quotient divide by one, which is exact: all rules have the same latency.
        divisor = select(self._chosen.ratio, denominator.value, ONE)
        quotient = self._call(
            path, "quotient", a=Timed(dividend, denominator.cycle), b=Timed(divisor, denominator.cycle)
        )
        return self._call(path, "parameter", a=quotient, b=scalars.post_scale, c=p, fused=self.program.p_fused)
