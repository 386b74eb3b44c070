"""Datapaths computed for many cycles at once give what their registers give, and nothing else is taken for one."""

from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Array, C, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.datapaths import DatapathError

OUTPUTS = {"sums": 64, "orders": 8, "chosen": 100, "shifted": 40, "looked_up": 5, "bits": 100}


class Operations(wiring.Component):
    """Every operation that a datapath may have, between registers."""

    HELD_INPUTS = ("gain",)
    LATENCY = 11

    def __init__(self) -> None:
        inputs = {"a": In(40), "b": In(signed(20)), "wide": In(100), "gain": In(24)}
        super().__init__(inputs | {name: Out(width) for name, width in OUTPUTS.items()})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a, b, wide = (self._registers(m, value, 4) for value in (self.a, self.b, self.wide))
        product = self._registers(m, a[:30] * self.gain, 1)
        later, later_b = self._registers(m, a, 1), self._registers(m, b, 1)
        table = Array(C(7 * k % 32, 5) for k in range(32))
        results = {
            "sums": product + later - later_b,
            "orders": Cat(b < -5, b >= a[:19].as_signed(), a > 1 << 30, a[:20] <= b[:20], a == 3, wide != 0,
                          wide.any(), a[:3].all()),
            "chosen": Mux(a[0], wide, ~wide ^ a),
            "shifted": a >> b[:6],
            "looked_up": table[a[:5]],
            "bits": Cat(wide[60:], b, wide[:33], wide[:7] & a[5:12]),
        }  # fmt: skip
        for name, result in results.items():
            left = self.LATENCY - (5 if name == "sums" else 4)
            m.d.comb += getattr(self, name).eq(self._registers(m, result, left))
        return m

    def _registers(self, m: Module, value: Any, count: int) -> Any:
        for _ in range(count):
            stage = Signal(value.shape(), reset_less=True)
            m.d.sync += stage.eq(value)
            value = stage
        return value


class Holder(wiring.Component):
    """Holds a component: the top itself is always simulated as it is."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.LATENCY = inner.LATENCY
        super().__init__(dict(inner.signature.members))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.inner = self._inner
        wiring.connect(m, wiring.flipped(self), self._inner)
        return m


def test_blocks_of_cycles_equal_single_ones():
    rng = np.random.default_rng(0)
    inputs = {
        "a": rng.integers(0, 1 << 40, 3000, np.uint64) >> rng.integers(0, 40, 3000).astype(np.uint64),
        "b": rng.integers(-(1 << 19), 1 << 19, 3000, np.int64) >> rng.integers(0, 20, 3000),
        "wide": rng.integers(0, 1 << 32, (3000, 4), np.uint64) & np.uint64([0xFFFFFFFF] * 3 + [15]),
        "gain": np.uint64(0xABCDEF),
    }
    single, blocks = (BurstUnit(Holder(Operations()), "sim-datapath", batch=batch) for batch in (False, True))
    expected, got = single.run(inputs), blocks.run(inputs)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], expected[name], name)


def test_held_inputs_may_change_between_runs():
    blocks = BurstUnit(Holder(Operations()), "sim-datapath", batch=True)
    a = np.arange(500, dtype=np.uint64)
    zero = {"b": np.int64(0), "wide": np.zeros(4, np.uint64)}
    for gain in (3, 5):
        got = blocks.run({"a": a, "gain": np.uint64(gain), **zero})["sums"]
        np.testing.assert_array_equal(got, a * np.uint64(gain + 1))


class Wrong(wiring.Component):
    """A unit that is no free-running datapath, by `kind`."""

    HELD_INPUTS = ()
    LATENCY = 1
    i: In(8)
    o: Out(8)

    def __init__(self, kind: str) -> None:
        self._kind = kind
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        late = Signal(8, reset_less=True)
        m.d.sync += late.eq(late + self.i if self._kind == "sum" else self.i)
        results = {"sum": late, "skew": late ^ self.i, "power": (1 << self.i)[:8]}
        m.d.comb += self.o.eq(results[self._kind])
        return m


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("sum", "feed back"), ("skew", r"same cycle, not in \[0, 1\]"), ("power", "not \\$sshl|not \\$shl")],
)
def test_other_units_are_refused(kind, rule):
    with pytest.raises(DatapathError, match=rule):
        BurstUnit(Holder(Wrong(kind)), "sim-datapath-wrong", batch=True)
