"""AXPBY equals the model's mul and muladd, fused and not."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.fp.raw import RAW
from nearflash.gateware.update.axpby import Axpby
from nearflash.model.fp.mul import mul
from nearflash.model.fp.muladd import muladd
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.verify.fixtures.fp32_unit import Fp32Unit
from nearflash.verify.fixtures.vectors import operands


class Together(wiring.Component):
    """An Axpby whose operands all come in the same cycle."""

    a: In(RAW)
    x: In(RAW)
    b: In(RAW)
    y: In(RAW)
    fused: In(1)
    o: Out(RAW)

    def __init__(self) -> None:
        self._axpby = Axpby()
        self.LATENCY = self._axpby.LATENCY
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.axpby = axpby = self._axpby
        for name in ("a", "x", "b", "y", "fused"):
            m.d.comb += getattr(axpby, name).eq(delay(m, getattr(self, name), axpby.ARRIVAL.get(name, 0)))
        m.d.comb += self.o.eq(axpby.o)
        return m


@pytest.fixture(scope="module")
def unit() -> BurstUnit:
    return BurstUnit(Fp32Unit(Together()), "axpby")


@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_model(unit: BurstUnit, fused: bool) -> None:
    a, x, b, y = operands(100_000, 4, seed=1)
    got = unit.run({"a": a, "x": x, "b": b, "y": y, "fused": int(fused)})["o"]
    np.testing.assert_array_equal(got, muladd(b, y, mul(a, x)[0], fused=fused)[0])


def test_latency_is_as_stated(unit: BurstUnit) -> None:
    assert unit.latency() == unit.stated_latency
