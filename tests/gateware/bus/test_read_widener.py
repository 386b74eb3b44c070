import random

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.read_widener import ReadWidener
from nearflash.gateware.bus.transfer import BusError, TransferCommand
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.read_memory import WithMemory

BYTES = random.Random(1).randbytes(4096)


class Reader(wiring.Component):
    """A reader of 64 bits on a wide port."""

    def __init__(self, wide_bits):
        self.wide_bits = wide_bits
        super().__init__(
            {
                "i": In(stream.Signature(TransferCommand)),
                "o": Out(stream.Signature(64)),
                "bus": Out(Axi4ReadSignature(wide_bits)),
                "error": Out(BusError),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.reader = reader = BurstReader(64, max_burst_bytes=256, max_outstanding=4)
        m.submodules.widener = widener = ReadWidener(64, self.wide_bits, max_outstanding=3)
        wiring.connect(m, reader.bus, widener.port)
        wiring.connect(m, widener.bus, wiring.flipped(self.bus))
        wiring.connect(m, wiring.flipped(self.i), reader.i_command)
        wiring.connect(m, reader.o, wiring.flipped(self.o))
        m.d.comb += self.error.eq(reader.error)
        return m


def words(bits):
    size = bits // 8
    return [int.from_bytes(BYTES[start : start + size], "little") for start in range(0, len(BYTES), size)]


@pytest.mark.parametrize("wide_bits", [128, 512])
@pytest.mark.parametrize("stalls", STALLS)
def test_beats_are_those_of_the_address(wide_bits, stalls):
    rng = random.Random(wide_bits)
    places = [(rng.randrange(400), rng.randrange(1, 70)) for _ in range(12)] + [(0, 8), (7, 1), (504, 8), (3, 5)]
    commands = [{"address": 8 * place, "beats": beats} for place, beats in places]
    expected = [word for place, beats in places for word in words(64)[place : place + beats]]
    got = run_streams(
        WithMemory(Reader(wide_bits), words(wide_bits), latency_cycles=3, pause=3),
        {"i": commands},
        {"o": len(expected)},
        stalls=stalls,
        seed=5,
    )
    assert got["o"] == expected


def test_a_port_that_is_not_wider_is_refused():
    with pytest.raises(ValueError, match="wide_bits must be more than the 64 of the master, not 64"):
        ReadWidener(64, 64)
