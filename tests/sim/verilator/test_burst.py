"""BurstUnit against numpy on small datapaths with every port class."""

from itertools import pairwise

import numpy as np
import pytest
from amaranth.hdl import Module, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.verilator import build
from nearflash.sim.verilator.build import BuildError, build_library
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.ports import integers_from_words, words_from_integers


class MultiplyAdd(wiring.Component):
    """o = a * b + c (c a wide word), registered `LATENCY` times; `is_negative` is o's sign."""

    a: In(signed(9))
    b: In(signed(33))
    c: In(signed(70))
    o: Out(signed(72))
    low: Out(signed(12))
    LATENCY = 3

    def elaborate(self, platform):
        m = Module()
        stages = [Signal(signed(72), name=f"stage{index}") for index in range(self.LATENCY)]
        m.d.sync += stages[0].eq(self.a * self.b + self.c)
        m.d.sync += [after.eq(before) for before, after in pairwise(stages)]
        m.d.comb += [self.o.eq(stages[-1]), self.low.eq(stages[-1][:12].as_signed())]
        return m


class Adder(wiring.Component):
    """Combinational: no clock and no reset reach the Verilog."""

    a: In(32)
    b: In(32)
    o: Out(33)
    signed: Out(1)  # a word of C++
    LATENCY = 0

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [self.o.eq(self.a + self.b), self.signed.eq(self.a[31])]
        return m


class Uneven(wiring.Component):
    """`early` leads `late` by a cycle, which no LATENCY can describe."""

    a: In(8)
    early: Out(8)
    late: Out(8)
    LATENCY = 1

    def elaborate(self, platform):
        m = Module()
        m.d.sync += [self.early.eq(self.a), self.late.eq(self.early)]
        return m


@pytest.fixture(scope="module")
def multiply_add():
    return BurstUnit(MultiplyAdd(), "test_multiply_add")


@pytest.fixture(scope="module")
def adder():
    return BurstUnit(Adder(), "test_adder")


def test_signed_and_wide_ports(multiply_add):
    rng = np.random.default_rng(1)
    a = rng.integers(-256, 256, 1000)
    b = rng.integers(-(1 << 32), 1 << 32, 1000)
    c = [int.from_bytes(rng.bytes(9), "little") % (1 << 70) - (1 << 69) for _ in range(1000)]
    result = multiply_add.run({"a": a, "b": b, "c": words_from_integers(c, 70)})
    expected = [int(x) * int(y) + z for x, y, z in zip(a, b, c, strict=True)]
    assert integers_from_words(result["o"], 72) == expected
    assert result["low"].dtype == np.int16
    assert result["low"].tolist() == [(value + 2048) % 4096 - 2048 for value in expected]


def test_combinational_and_scalar(adder):
    a = np.arange(1 << 16, dtype=np.uint32) * 65521
    result = adder.run({"a": a, "b": 0xFFFFFFFF})
    assert (result["o"] == a.astype(np.uint64) + 0xFFFFFFFF).all()
    assert result["o"].dtype == np.uint64
    assert (result["signed"] == a >> 31).all()


def test_latency_is_measured(multiply_add, adder):
    assert multiply_add.latency() == MultiplyAdd.LATENCY
    assert adder.latency() == 0


def test_latency_of_uneven_outputs():
    with pytest.raises(ValueError, match=r"all outputs must react after the same number of cycles, not \{.*'early': 1"):
        BurstUnit(Uneven(), "test_uneven").latency()


def test_bad_inputs(adder):
    with pytest.raises(ValueError, match=r"inputs must be \['a', 'b'\], not \['a'\]"):
        adder.run({"a": 1})
    with pytest.raises(ValueError, match=r"input `b` must be within \[0, 4294967295\], not \[-1, -1\]"):
        adder.run({"a": 1, "b": -1})
    with pytest.raises(ValueError, match=r"input `b` must have the shape \(3,\), not \(2,\)"):
        adder.run({"a": [1, 2, 3], "b": [1, 2]})
    with pytest.raises(ValueError, match="input `a` must be of an integer type, not float64"):
        adder.run({"a": 1.5, "b": 1})


def test_no_latency():
    with pytest.raises(ValueError, match="object must have a LATENCY attribute, not none"):
        BurstUnit(object(), "test_object")


def test_compile_error_is_named():
    with pytest.raises(BuildError, match=r"(?s)must exit with 0, not 1 \(whole log: .*build.log\):.*oops"):
        build_library(Adder(), name="test_broken", shim="int oops = undefined_thing;", brief=True)


@pytest.mark.full
def test_a_library_of_one_file_gives_what_one_of_many_gives(monkeypatch):
    inputs = {
        "a": np.arange(-4, 4),
        "b": np.arange(8) << 20,
        "c": words_from_integers([(1 << 68) - each for each in range(8)], 70),
    }
    one = BurstUnit(MultiplyAdd(), "test_one_file").run(inputs)
    monkeypatch.setattr(build, "_ONE_FILE_BYTES", 0)
    many = BurstUnit(MultiplyAdd(), "test_many_files").run(inputs)
    assert [one[name].tolist() for name in ("o", "low")] == [many[name].tolist() for name in ("o", "low")]
