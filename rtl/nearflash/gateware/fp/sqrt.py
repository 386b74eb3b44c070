"""fp32 square root, by the non-restoring method, two bits of the root a cycle."""

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, register, wire
from nearflash.gateware.fp.raw import FLAGS, RAW, SIG_BITS
from nearflash.gateware.fp.round import Round

__all__ = ["Sqrt"]

_ROOT_BITS = SIG_BITS + 1
_BITS_PER_CYCLE = 2


class Sqrt(wiring.Component):
    """o = sqrt(a).

    Timing: latency LATENCY cycles, one result a cycle, free-running.
    Numerics: fp32, rounds once, to nearest even; sqrt(-0) = -0; equals nearflash.model.fp.sqrt to the bit, exceptions
    too.

    Members: a, o (RAW), flags (FLAGS; `invalid` below zero).
    """

    a: In(RAW)
    o: Out(RAW)
    flags: Out(FLAGS)

    def __init__(self) -> None:
        self._round = Round(subnormals=False)
        self._cycles = (_ROOT_BITS - 1) // _BITS_PER_CYCLE
        self.LATENCY = self._cycles + self._round.LATENCY
        super().__init__()

    def elaborate(self, platform: Any) -> Module:
        """Build the unit."""
        m = Module()
        a = self.a
        # Cycles 0 to 11: the radicand, in [1, 4), enters two bits a step; its first two make the root's first bit.
        radicand: Value = Mux(a.exp[0], Cat(C(0, 2), a.sig), Cat(C(0, 1), a.sig, C(0, 1)))
        root: Value = C(1, 1)
        remainder: Value = Cat((radicand[-2:] - 1)[:2], C(0, 1))
        radicand = radicand[:-2]
        for _ in range(self._cycles):
            for _ in range(_BITS_PER_CYCLE):
                remainder = wire(m, _step(remainder, radicand[-2:] if len(radicand) else C(0, 2), root))
                root = wire(m, Cat(~remainder[-1], root))
                radicand = radicand[:-2] if len(radicand) else radicand
            remainder, root = register(m, remainder), register(m, root)
            radicand = register(m, radicand) if len(radicand) else radicand
        # Behind the last cycle: a root that ends early leaves the remainder -(2 root + 1). None ends in the guard bit.
        exact = remainder == Cat(C(1, 1), ~root, C(1, 1))
        invalid = a.sign & ~a.zero & ~a.nan
        specials = (a.exp >> 1, a.sign, a.zero, a.inf & ~a.sign, a.nan | invalid, invalid)
        exp, sign, zero, inf, nan, invalid = (delay(m, value, self._cycles) for value in specials)
        m.submodules.round = rounder = self._round
        m.d.comb += [
            rounder.i.sig.eq(Cat(~exact, root)),
            rounder.i.exp.eq(exp),
            Cat(rounder.i.sign, rounder.i.zero, rounder.i.inf, rounder.i.nan).eq(Cat(sign, zero, inf, nan)),
            rounder.invalid.eq(invalid),
            self.o.eq(rounder.o),
            self.flags.eq(rounder.flags),
        ]
        return m


def _step(remainder: Value, pair: Value, root: Value) -> Value:
    """Subtract 4 root + 1, or add 4 root + 3 where the last step went below zero: in bits {~root, 1, 1}, {root, 1, 1}.

    The root's last bit is zero where it did. The remainder has two bits more than the root, its sign among them.
    """
    subtract = root[0]
    operand = Cat(C(3, 2), root ^ subtract.replicate(len(root)), subtract.replicate(2))
    return (Cat(pair, remainder) + operand)[: len(root) + 3]
