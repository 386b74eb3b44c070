"""The bridge to AXI3: memory reads and writes as an AXI4 master sends them, seen by an AXI3 slave."""

import random

import pytest

from nearflash.gateware.bus.axi3_bridge import Axi3Bridge

OKAY, SLVERR, DECERR = 0, 2, 3
BEAT_BYTES = 8
CYCLES = 6000


class Slave:
    """An AXI3 memory of words: reads give the address of each beat, writes are kept; addresses in `errors` fail."""

    def __init__(self, channel, bus, percent, errors=()):
        self.errors = set(errors)
        self.reads = channel(bus, "ar", ("addr", "len", "size", "burst"), percent)
        self.data = channel(bus, "r", ("data", "resp", "last"), percent)
        self.writes = channel(bus, "aw", ("addr", "len", "size", "burst"), percent)
        self.beats = channel(bus, "w", ("data", "strb", "last"), percent)
        self.responses = channel(bus, "b", ("resp",), percent)
        self.written = {}

    def processes(self):
        senders, receivers = (self.data, self.responses), (self.reads, self.writes, self.beats)
        return [*(one.send for one in senders), *(one.receive for one in receivers), self.serve]

    async def serve(self, ctx):
        taken = 0
        while True:
            while self.reads.items:
                address, length, size, burst = self.reads.items.pop(0)
                assert (size, burst) == (3, 1)
                for beat in range(length + 1):
                    response = SLVERR if address in self.errors else OKAY
                    self.data.items.append((address + BEAT_BYTES * beat, response, beat == length))
            while self.writes.items and sum(last for *_, last in self.beats.items[taken:]):
                address, length, size, burst = self.writes.items.pop(0)
                assert (size, burst) == (3, 1)
                for beat in range(length + 1):
                    word, strobe, last = self.beats.items[taken]
                    taken += 1
                    assert last == (beat == length), "last must mark a piece's last beat"
                    self.written[address + BEAT_BYTES * beat] = (word, strobe)
                self.responses.items.append((SLVERR if address in self.errors else OKAY,))
            await ctx.tick()


@pytest.fixture
def bridge(simulate, channel):
    """Send bursts and words of writes through a bridge; return what came back, and the slave."""

    def run(reads=(), writes=(), percent=0, errors=()):
        dut = Axi3Bridge(64, 6)
        slave = Slave(channel, dut.bus, percent, errors)
        sent = {
            "ar": channel(dut.port, "ar", ("addr", "len"), percent, list(reads)),
            "aw": channel(dut.port, "aw", ("addr", "len"), percent, [burst for burst, _ in writes]),
            "w": channel(dut.port, "w", ("data", "strb"), percent, [word for _, words in writes for word in words]),
        }
        data = channel(dut.port, "r", ("data", "resp", "last"), percent)
        responses = channel(dut.port, "b", ("resp",), percent)
        beats = sum(length + 1 for _, length in reads)

        async def wait(ctx):
            for _ in range(CYCLES):
                await ctx.tick()
                if len(data.items) >= beats and len(responses.items) >= len(writes):
                    break
            await ctx.tick().repeat(20)

        ends = [one.send for one in sent.values()] + [data.receive, responses.receive]
        simulate(dut, wait, *ends, *slave.processes())
        assert (len(data.items), len(responses.items)) == (beats, len(writes))
        return data.items, [response for (response,) in responses.items], slave

    return run


def bursts(seed, count):
    rng = random.Random(seed)
    return [(0x1000 * page + 8 * rng.choice([0, 3, 100]), rng.choice([0, 5, 15, 16, 40, 127])) for page in range(count)]


@pytest.mark.parametrize("percent", [0, 40])
def test_reads_come_back_whole_with_one_last(bridge, percent):
    reads = bursts(1, 8)
    found, _, _ = bridge(reads=reads, percent=percent)
    assert found == [
        (address + 8 * beat, OKAY, beat == length) for address, length in reads for beat in range(length + 1)
    ]


@pytest.mark.parametrize("percent", [0, 40])
def test_writes_reach_their_addresses_and_are_answered_once(bridge, percent):
    rng = random.Random(2)
    writes = [
        (burst, [(rng.getrandbits(64), rng.getrandbits(8)) for _ in range(burst[1] + 1)]) for burst in bursts(3, 6)
    ]
    _, responses, slave = bridge(writes=writes, percent=percent)
    assert responses == [OKAY] * len(writes)
    assert slave.written == {
        address + 8 * beat: word for (address, _), words in writes for beat, word in enumerate(words)
    }


def test_an_error_of_one_part_is_the_bursts(bridge):
    reads, writes = [(0x2000, 40), (0x3000, 2)], [((0x2000, 40), [(7, 255)] * 41), ((0x3000, 2), [(8, 255)] * 3)]
    found, responses, _ = bridge(reads=reads, writes=writes, errors=[0x2080])
    assert [response for _, response, _ in found] == [OKAY] * 16 + [SLVERR] * 16 + [OKAY] * (9 + 3)
    assert responses == [SLVERR, OKAY]


@pytest.mark.parametrize("percent", [0, 40])
def test_what_lies_above_4_gib_is_answered_with_an_error_and_never_reaches_memory(bridge, percent):
    high = 1 << 32
    reads = [(0x2000, 3), (high + 0x2000, 20), (0x4000, 1)]
    writes = [((0x2000, 1), [(1, 255), (2, 255)]), ((high + 0x2000, 17), [(9, 255)] * 18), ((0x4000, 0), [(3, 255)])]
    found, responses, slave = bridge(reads=reads, writes=writes, percent=percent)
    assert [response for _, response, _ in found] == [OKAY] * 4 + [DECERR] * 21 + [OKAY] * 2
    assert [last for *_, last in found] == [0, 0, 0, 1] + [0] * 20 + [1] + [0, 1]
    assert responses == [OKAY, DECERR, OKAY]
    assert slave.written == {0x2000: (1, 255), 0x2008: (2, 255), 0x4000: (3, 255)}


def test_a_beat_a_cycle(simulate):
    """From a slave that never pauses, the beats of a long burst come without a gap between its parts."""
    dut = Axi3Bridge(64, 6)
    cycles = []

    async def read(ctx):
        for signal in (dut.bus.arready, dut.bus.rvalid, dut.port.rready, dut.port.arvalid):
            ctx.set(signal, 1)
        ctx.set(dut.port.arlen, 255)
        await ctx.tick()
        ctx.set(dut.port.arvalid, 0)
        beat = 0
        for cycle in range(300):
            ctx.set(dut.bus.rlast, beat % 16 == 15)
            _, _, moved = await ctx.tick().sample(dut.bus.rready)
            beat += moved
            cycles.extend([cycle] * moved)

    simulate(dut, read)
    assert cycles == list(range(cycles[0], cycles[0] + 256))
    assert cycles[0] == dut.LATENCY
