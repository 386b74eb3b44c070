import random

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from nearflash.gateware.bus.axi import Axi4WriteSignature
from nearflash.gateware.bus.transfer import TransferCommand
from nearflash.gateware.bus.write import BurstWriter
from nearflash.gateware.bus.write_widener import WriteWidener


class Writer(wiring.Component):
    """A writer of 64 bits on a wide port."""

    def __init__(self, wide_bits):
        self.writer = BurstWriter(64, max_burst_bytes=256, max_outstanding=4)
        self.widener = WriteWidener(64, wide_bits, max_outstanding=2)
        super().__init__(
            {
                "i_command": In(stream.Signature(TransferCommand)),
                "i": In(stream.Signature(self.writer.beat_layout)),
                "idle": Out(1),
                "bus": Out(Axi4WriteSignature(wide_bits)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.writer, m.submodules.widener = self.writer, self.widener
        wiring.connect(m, self.writer.bus, self.widener.port)
        wiring.connect(m, self.widener.bus, wiring.flipped(self.bus))
        wiring.connect(m, wiring.flipped(self.i_command), self.writer.i_command)
        wiring.connect(m, wiring.flipped(self.i), self.writer.i)
        m.d.comb += self.idle.eq(self.writer.idle)
        return m


def written(wide_bits, commands, pause, seed):
    """Bytes that the slave has, and those that were sent; the slave takes data before addresses, or after."""
    unit, rng, size = Writer(wide_bits), random.Random(seed), wide_bits // 8
    bus = unit.bus
    memory, sent, addresses, beats, ended = {}, {}, [], [], []

    async def order(ctx):
        for address, count in commands:
            ctx.set(unit.i_command.payload, {"address": address, "beats": count})
            ctx.set(unit.i_command.valid, 1)
            await ctx.tick().until(unit.i_command.ready)
            ctx.set(unit.i_command.valid, 0)

    async def feed(ctx):
        for address, count in commands:
            for n in range(count):
                word, strb = rng.getrandbits(64), rng.choice([0, 0xFF, 0xFF, 0x3C])
                sent.update({address + 8 * n + b: word >> 8 * b & 0xFF for b in range(8) if strb >> b & 1})
                ctx.set(unit.i.payload, {"data": word, "strb": strb})
                ctx.set(unit.i.valid, 1)
                await ctx.tick().until(unit.i.ready)
                ctx.set(unit.i.valid, 0)
                while rng.random() < pause:
                    await ctx.tick()

    async def take(ctx, prefix, found):
        own = random.Random(f"{seed} {prefix}")
        valid, ready = getattr(bus, f"{prefix}valid"), getattr(bus, f"{prefix}ready")
        while True:
            takes = own.random() >= pause
            ctx.set(ready, takes)
            await ctx.delay(0)
            if takes and ctx.get(valid):
                found(ctx)
            await ctx.tick()

    async def take_addresses(ctx):
        await take(ctx, "aw", lambda ctx: addresses.append((ctx.get(bus.awaddr), ctx.get(bus.awlen))))

    async def take_data(ctx):
        await take(ctx, "w", lambda ctx: beats.append((ctx.get(bus.wdata), ctx.get(bus.wstrb), ctx.get(bus.wlast))))

    async def answer(ctx):
        while True:
            await ctx.tick()
            if not addresses or not any(last for *_, last in beats):
                continue
            (address, length), count = addresses.pop(0), 0
            assert address % size == 0 and address // 4096 == (address + length * size) // 4096
            while True:
                word, strb, last = beats.pop(0)
                for b in range(size):
                    if strb >> b & 1:
                        assert address + count * size + b not in memory
                        memory[address + count * size + b] = word >> 8 * b & 0xFF
                count += 1
                if last:
                    break
            assert count == length + 1
            ctx.set(unit.bus.bvalid, 1)
            await ctx.tick().until(unit.bus.bready)
            ctx.set(unit.bus.bvalid, 0)

    async def watch(ctx):
        await ctx.tick().repeat(4)
        await ctx.tick().until(unit.idle & ~unit.i_command.valid & ~unit.i.valid)
        while len(sent) and len(memory) < len(sent):
            await ctx.tick()
        ended.append(True)

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    for process in (order, feed, watch):
        simulator.add_testbench(process, background=process is not watch)
    for process in (take_addresses, take_data):
        simulator.add_testbench(process, background=True)
    simulator.add_testbench(answer, background=True)
    simulator.run_until(5e-3)
    assert ended, "the slave lacks bytes"
    return memory, sent


@pytest.mark.parametrize("wide_bits", [128, 512])
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_bytes_arrive_once_and_where_they_belong(wide_bits, pause):
    rng, at, commands = random.Random(wide_bits), 0, []
    for _ in range(14):
        at += 8 * rng.randrange(12)
        beats = rng.randrange(1, 40)
        commands.append((at, beats))
        at += 8 * beats
    memory, sent = written(wide_bits, commands, pause, seed=3)
    assert memory == sent and len(sent) > 500


def test_a_port_that_is_not_wider_is_refused():
    with pytest.raises(ValueError, match="wide_bits must be more than the 64 of the master, not 32"):
        WriteWidener(64, 32)
