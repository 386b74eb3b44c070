"""A small unit to mutate, and vectors of its own arithmetic."""

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import register
from nearflash.verify.mutants.target import Target


class Sum(wiring.Component):
    """o = a + b, and a term that is always zero."""

    LATENCY = 1

    a: In(8)
    b: In(8)
    o: Out(9)

    def elaborate(self, platform):
        m = Module()
        redundant = (self.a & self.b) & ~self.a
        m.d.comb += self.o.eq(register(m, (self.a + self.b) | redundant))
        return m


@pytest.fixture
def sum_component():
    return Sum


@pytest.fixture
def sum_target():
    def build(largest=255, wrong=0):
        def vectors(rng):
            a, b = rng.integers(0, largest + 1, (2, 500), dtype=np.uint8)
            return {"a": a, "b": b}, {"o": (a.astype(np.uint16) + b) ^ wrong}

        return Target(Sum, vectors, mutants=60)

    return build
