from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import delay, digit_places, normalize_digit, shift_right


class Shifters(wiring.Component):
    LATENCY = 0
    i: In(11)
    distance: In(4)
    right: Out(11)
    sticky: Out(1)
    left: Out(11)
    zeros: Out(4)

    def elaborate(self, platform):
        m = Module()
        right, sticky = shift_right(m, self.i, self.distance)
        left, digits = self.i, []
        for place in digit_places(4):
            left, digit = normalize_digit(m, left, place)
            digits.insert(0, digit)
        m.d.comb += [self.right.eq(right), self.sticky.eq(sticky), self.left.eq(left), self.zeros.eq(Cat(*digits))]
        m.d.sync += self.i.eq(self.i)
        return m


class Delayed(wiring.Component):
    LATENCY = 3
    i: In(5)
    o: Out(5)

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.eq(delay(m, self.i, self.LATENCY))
        return m


def test_places_cover_every_bit():
    assert digit_places(5) == [slice(3, 5), slice(1, 3), slice(0, 1)]
    assert digit_places(4) == [slice(2, 4), slice(0, 2)]


def test_shifts(simulate):
    values = list(range(0, 1 << 11, 7)) * 2
    distances = [k % 16 for k in range(len(values))]
    found = simulate(Shifters(), {"i": values, "distance": distances}, ["right", "sticky", "left", "zeros"])
    for k, (value, distance) in enumerate(zip(values, distances, strict=True)):
        assert found["right"][k] == value >> distance
        assert found["sticky"][k] == (value % (1 << distance) != 0)
        if value:
            assert found["zeros"][k] == 11 - value.bit_length()
            assert found["left"][k] == value << found["zeros"][k]


def test_delay(simulate):
    assert simulate(Delayed(), {"i": list(range(20))}, ["o"])["o"] == list(range(20))
