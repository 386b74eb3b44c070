import numpy as np

from nearflash.gateware.fp.add import Add
from nearflash.gateware.fp.convert import FromNarrow, ToNarrow
from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import RAW, Pack, RawLayout, Unpack
from nearflash.verify.fixtures.fp32_unit import Fp32Unit

ONE, SIGNALING, QUIET = 0x3F800000, 0x7F800001, 0x7FC00001


def shapes(unit: Fp32Unit) -> dict[str, object]:
    return {name: member.shape for name, member in unit.signature.members.items() if name != "flags"}


def test_ports_and_latency():
    core = Add()
    unit = Fp32Unit(core)
    assert shapes(unit) == {"a": 32, "b": 32, "o": 32}
    assert unit.LATENCY == Unpack.LATENCY + core.LATENCY + Pack.LATENCY
    assert Fp32Unit(to := ToNarrow()).LATENCY == Unpack.LATENCY + to.LATENCY
    assert Fp32Unit(FromNarrow()).LATENCY == FromNarrow.LATENCY + Pack.LATENCY


def test_operands_left_unpacked():
    assert shapes(Fp32Unit(MulAdd(51), unpacked=("b",)))["b"] == RawLayout(51)
    assert shapes(Fp32Unit(MulAdd(51)))["b"] == 32
    assert shapes(Fp32Unit(Add(), unpacked=("a", "b")))["a"] == RAW


def test_a_signaling_nan_is_invalid(simulate):
    inputs = {"a": [ONE, SIGNALING, ONE, QUIET], "b": [ONE, ONE, SIGNALING, ONE]}
    found = simulate(Fp32Unit(Add()), inputs, ["o", "flags"])
    assert found["o"] == [0x40000000, 0x7FC00000, 0x7FC00000, 0x7FC00000]
    np.testing.assert_array_equal(np.array(found["flags"]) >> 4, [0, 1, 1, 0])
