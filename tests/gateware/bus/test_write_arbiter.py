import random
from collections import deque

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from nearflash.gateware.bus.axi import Axi4WriteSignature, AxiResponse
from nearflash.gateware.bus.transfer import BusError, TransferCommand
from nearflash.gateware.bus.write import BurstWriter
from nearflash.gateware.bus.write_arbiter import WriteArbiter

WRITERS, REGION_BYTES = 3, 8192


class Writers(wiring.Component):
    """Three burst writers behind an arbiter."""

    def __init__(self):
        self.writers = [BurstWriter(64, max_burst_bytes=64, max_outstanding=2) for _ in range(WRITERS)]
        super().__init__(
            {
                "i_command": In(stream.Signature(TransferCommand)).array(WRITERS),
                "i": In(stream.Signature(self.writers[0].beat_layout)).array(WRITERS),
                "idle": Out(WRITERS),
                "error": Out(BusError).array(WRITERS),
                "bus": Out(Axi4WriteSignature(64)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = WriteArbiter(WRITERS, 64, max_outstanding=4)
        wiring.connect(m, arbiter.bus, wiring.flipped(self.bus))
        for index, writer in enumerate(self.writers):
            m.submodules[f"writer_{index}"] = writer
            wiring.connect(m, wiring.flipped(self.i_command[index]), writer.i_command)
            wiring.connect(m, wiring.flipped(self.i[index]), writer.i)
            wiring.connect(m, writer.bus, arbiter.port[index])
            m.d.comb += [self.idle[index].eq(writer.idle), self.error[index].eq(writer.error)]
        return m


class Slave:
    """Takes addresses, data and answers at paces of their own; keeps bytes, the bursts, and how many were open."""

    def __init__(self, bus, seed, pause, bad_address):
        self.bus, self.seed, self.pause, self.bad_address = bus, seed, pause, bad_address
        self.memory, self.bursts, self.most_open = {}, [], 0
        self.addresses, self.data = deque(), deque()

    async def take(self, ctx, prefix, found):
        bus, rng = self.bus, random.Random(f"{self.seed} {prefix}")
        valid, ready = getattr(bus, f"{prefix}valid"), getattr(bus, f"{prefix}ready")
        while True:
            takes = rng.random() >= self.pause
            ctx.set(ready, takes)
            await ctx.delay(0)
            if takes and ctx.get(valid):
                found(ctx)
            await ctx.tick()

    async def take_addresses(self, ctx):
        def found(ctx):
            burst = (ctx.get(self.bus.awaddr), ctx.get(self.bus.awlen))
            self.addresses.append(burst)
            self.bursts.append(burst)
            self.most_open = max(self.most_open, len(self.addresses))

        await self.take(ctx, "aw", found)

    async def take_data(self, ctx):
        beats = []

        def found(ctx):
            beats.append((ctx.get(self.bus.wdata), ctx.get(self.bus.wstrb)))
            if ctx.get(self.bus.wlast):
                self.data.append(beats.copy())
                beats.clear()

        await self.take(ctx, "w", found)

    async def answer(self, ctx):
        bus, rng = self.bus, random.Random(f"{self.seed} b")
        while True:
            await ctx.tick()
            if not (self.addresses and self.data) or rng.random() < self.pause:
                continue
            (address, length), beats = self.addresses[0], self.data.popleft()
            assert len(beats) == length + 1
            for n, (word, strb) in enumerate(beats):
                for byte in range(8):
                    if strb >> byte & 1:
                        place = address + 8 * n + byte
                        assert place not in self.memory
                        self.memory[place] = word >> 8 * byte & 0xFF
            ctx.set(bus.bresp, AxiResponse.SLVERR if address >= self.bad_address else AxiResponse.OKAY)
            ctx.set(bus.bvalid, 1)
            while True:
                _, _, ready = await ctx.tick().sample(bus.bready)
                if ready:
                    break
            ctx.set(bus.bvalid, 0)
            self.addresses.popleft()


def run(seed, pause, commands, bad_address=1 << 40):
    """Commands (address, beats) of each writer; returns what the slave saw, what was sent, and each writer's error."""
    unit = Writers()
    slave, sent, errors, done = Slave(unit.bus, seed, pause, bad_address), {}, [], []

    def feeder(index):
        async def feed(ctx):
            rng = random.Random(f"{seed} {index}")
            for address, beats in commands[index]:
                for n in range(beats):
                    word, strb = rng.getrandbits(64), rng.choice([0, 0xFF, 0xFF, 0x3C])
                    sent.update(
                        {address + 8 * n + byte: word >> 8 * byte & 0xFF for byte in range(8) if strb >> byte & 1}
                    )
                    ctx.set(unit.i[index].payload, {"data": word, "strb": strb})
                    ctx.set(unit.i[index].valid, 1)
                    await ctx.tick().until(unit.i[index].ready)
                    ctx.set(unit.i[index].valid, 0)
                    while rng.random() < pause:
                        await ctx.tick()

        async def order(ctx):
            for address, beats in commands[index]:
                ctx.set(unit.i_command[index].payload, {"address": address, "beats": beats})
                ctx.set(unit.i_command[index].valid, 1)
                await ctx.tick().until(unit.i_command[index].ready)
                ctx.set(unit.i_command[index].valid, 0)
            done.append(index)

        return feed, order

    async def watch(ctx):
        for _ in range(40_000):
            await ctx.tick()
            if len(done) == WRITERS and ctx.get(unit.idle) == (1 << WRITERS) - 1:
                break
        else:
            raise AssertionError("the writers must come to rest")
        errors.extend((ctx.get(error.seen), ctx.get(error.address)) for error in unit.error)

    sim = Simulator(unit)
    sim.add_clock(1e-6)
    sim.add_testbench(watch)
    for index in range(WRITERS):
        for process in feeder(index):
            sim.add_testbench(process, background=True)
    for process in (slave.take_addresses, slave.take_data, slave.answer):
        sim.add_testbench(process, background=True)
    sim.run()
    return slave, sent, errors


def some_commands(seed):
    """Apart from one another, each writer in a region of its own."""
    rng, lines = random.Random(seed), []
    for index in range(WRITERS):
        address, line = index * REGION_BYTES, []
        for _ in range(6):
            address += 8 * rng.randrange(9)
            beats = rng.randrange(1, 30)
            line.append((address, beats))
            address += 8 * beats
        lines.append(line)
    return lines


@pytest.mark.parametrize("pause", [0, 0.3, 0.7])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_writers_bytes_arrive_where_it_says(seed, pause):
    slave, sent, errors = run(seed, pause, some_commands(seed))
    assert slave.memory == sent
    assert not any(seen for seen, _ in errors)
    assert 2 <= slave.most_open <= 4


def test_an_error_goes_to_the_writer_whose_burst_it_is():
    commands = some_commands(3)
    _, _, errors = run(3, 0.3, commands, bad_address=2 * REGION_BYTES)
    assert errors == [(0, 0), (0, 0), (1, commands[2][0][0] & ~7)]


def test_nobody_waits_for_two_bursts_of_another():
    commands = [[(index * REGION_BYTES, 200)] for index in range(WRITERS)]
    slave, _, _ = run(4, 0, commands)
    owners = [address // REGION_BYTES for address, _ in slave.bursts]
    busy = owners[WRITERS : -2 * WRITERS]
    assert all(len(set(busy[n : n + WRITERS])) == WRITERS for n in range(len(busy) - WRITERS + 1))


def test_count_message():
    with pytest.raises(ValueError, match="count must be at least 2 masters, not 1"):
        WriteArbiter(1, 64)


def test_outstanding_message():
    with pytest.raises(ValueError, match="max_outstanding must be at least 2 bursts, not 1"):
        WriteArbiter(2, 64, max_outstanding=1)
