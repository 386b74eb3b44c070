import random

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.transfer import TransferCommand
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.read_memory import WithMemory

WORDS = [random.Random(1).getrandbits(64) for _ in range(512)]


class Readers(wiring.Component):
    """Three burst readers behind an arbiter."""

    def __init__(self):
        super().__init__(
            {
                "i": In(stream.Signature(TransferCommand)).array(3),
                "o": Out(stream.Signature(64)).array(3),
                "bus": Out(Axi4ReadSignature(64)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = ReadArbiter(3, 64, max_outstanding=4)
        wiring.connect(m, arbiter.bus, wiring.flipped(self.bus))
        for index in range(3):
            m.submodules[f"reader_{index}"] = reader = BurstReader(64, max_burst_bytes=64, max_outstanding=2)
            wiring.connect(m, wiring.flipped(self.i[index]), reader.i_command)
            wiring.connect(m, reader.o, wiring.flipped(self.o[index]))
            wiring.connect(m, reader.bus, arbiter.port[index])
        return m


@pytest.mark.parametrize("stalls", STALLS)
def test_every_reader_gets_its_own_beats(stalls):
    rng = random.Random(3)
    commands = [[{"address": 8 * rng.randrange(512), "beats": rng.randrange(1, 30)} for _ in range(8)] for _ in "abc"]
    beats = [[WORDS[(c["address"] // 8 + n) % 512] for c in line for n in range(c["beats"])] for line in commands]
    got = run_streams(
        WithMemory(Readers(), WORDS),
        {f"i__{n}": line for n, line in enumerate(commands)},
        {f"o__{n}": len(line) for n, line in enumerate(beats)},
        stalls=stalls,
        seed=5,
    )
    assert [got[f"o__{n}"] for n in range(3)] == beats


def test_count_message():
    with pytest.raises(ValueError, match="count must be at least 2 masters, not 1"):
        ReadArbiter(1, 64)


def test_outstanding_message():
    with pytest.raises(ValueError, match="max_outstanding must be at least 2 bursts, not 1"):
        ReadArbiter(2, 64, max_outstanding=1)
