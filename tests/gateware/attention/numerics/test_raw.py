import numpy as np
import pytest
from amaranth.hdl import Module, signed, unsigned
from amaranth.lib import wiring

from nearflash.gateware.attention.numerics.raw import ToRaw
from nearflash.gateware.fp.raw import Pack
from nearflash.model.attention.numerics.raw import to_fp32
from nearflash.sim.verilator.ports import words_from_integers

COUNT = 20_000


class Packed(wiring.Component):
    """A ToRaw with fp32 bits at its output."""

    def __init__(self, core, shape):
        self._core = core
        self.LATENCY = core.LATENCY + Pack.LATENCY
        super().__init__({"i": wiring.In(shape), "o": wiring.Out(32)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.core = core = self._core
        m.submodules.pack = pack = Pack()
        m.d.comb += [core.i.eq(self.i), pack.i.eq(core.o), self.o.eq(pack.o)]
        return m


@pytest.mark.parametrize(("shape", "lsb"), [(signed(98), -48), (unsigned(52), 0)])
def test_equals_the_model(num_unit, shape, lsb):
    unit = num_unit(Packed(ToRaw(shape, lsb), shape), f"_{shape.width}")
    rng = np.random.default_rng(shape.width)
    bits = shape.width - shape.signed
    values = [int.from_bytes(rng.bytes(13), "little") % (1 << bits) >> int(rng.integers(0, bits)) for _ in range(COUNT)]
    for _ in range(COUNT // 4):
        tie = 2 * int(rng.integers(1 << 23, 1 << 24)) + 1 << int(rng.integers(0, bits - 25))
        values += [tie - 1, tie, tie + 1, (1 << int(rng.integers(0, bits))) - 1]
    values += [0, (1 << bits) - 1]
    if shape.signed:
        values += [-value for value in values] + [-(1 << bits)]
    fed = words_from_integers(values, shape.width) if shape.width > 64 else np.array(values, np.uint64)
    np.testing.assert_array_equal(unit.run({"i": fed})["o"].view(np.float32), to_fp32(np.array(values, object), lsb))
    assert unit.latency() == unit.stated_latency


def test_messages():
    with pytest.raises(ValueError, match="shape must have at least 27 bits, not 26"):
        ToRaw(signed(26), 0)
    with pytest.raises(ValueError, match="lsb must be in -126 to 29, not 30"):
        ToRaw(signed(98), 30)
