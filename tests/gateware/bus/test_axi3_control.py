"""The bridge from AXI3 to a register block: single accesses, bursts, strobes, identifiers, and what it refuses."""

import pytest

from nearflash.abi.fields import Access, Register, RegisterMap
from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.axi3_control import Axi3ControlBridge
from nearflash.gateware.bus.registers import RegisterFile

BASE = 0x4000_0000
OKAY, SLVERR, DECERR = 0, 2, 3
FIXED, INCR, WRAP = 0, 1, 2
REGISTERS = RegisterMap("small", 0x40, (
    *(register for register in UPDATE if register.access is Access.CONTROL),
    *(Register(f"word_{at:x}", at, 32, Access.RW, "a word") for at in range(0x10, 0x30, 4)),
))  # fmt: skip


class Processor:
    """Bursts on the AXI3 side, one at a time; words of 32 bits."""

    def __init__(self, ctx, bus, wait):
        self.ctx, self.bus, self.wait = ctx, bus, wait

    async def address(self, channel, offset, count, kind, name):
        values = {"addr": BASE + offset, "len": count - 1, "size": 2, "burst": kind, "id": name, "valid": 1}
        for member, value in values.items():
            self.ctx.set(getattr(self.bus, channel + member), value)
        await self.ctx.tick().until(getattr(self.bus, f"{channel}ready"))
        self.ctx.set(getattr(self.bus, f"{channel}valid"), 0)

    async def read(self, offset, count=1, kind=INCR, name=5):
        """Words and responses of a burst."""
        bus, found = self.bus, []
        await self.address("ar", offset, count, kind, name)
        for beat in range(count):
            for _ in range(self.wait):
                await self.ctx.tick()
            self.ctx.set(bus.rready, 1)
            word, response, last, back = await self.ctx.tick().sample(
                bus.rdata, bus.rresp, bus.rlast, bus.rid
            ).until(bus.rvalid)  # fmt: skip
            self.ctx.set(bus.rready, 0)
            assert (last, back) == (beat == count - 1, name)
            found.append((word, response))
        assert not self.ctx.get(bus.rvalid)
        return found

    async def write(self, offset, words, kind=INCR, name=9, strobe=0b1111):
        """Response of a burst."""
        bus = self.bus
        await self.address("aw", offset, len(words), kind, name)
        for beat, word in enumerate(words):
            for _ in range(self.wait):
                await self.ctx.tick()
            for signal, value in ((bus.wdata, word), (bus.wstrb, strobe), (bus.wlast, beat == len(words) - 1),
                                  (bus.wvalid, 1)):  # fmt: skip
                self.ctx.set(signal, value)
            await self.ctx.tick().until(bus.wready)
            self.ctx.set(bus.wvalid, 0)
        self.ctx.set(bus.bready, 1)
        response, back = await self.ctx.tick().sample(bus.bresp, bus.bid).until(bus.bvalid)
        self.ctx.set(bus.bready, 0)
        assert back == name and not self.ctx.get(bus.bvalid)
        return response


@pytest.fixture
def run(simulate, joined):
    def start(scenario, wait=0):
        bridge, registers = Axi3ControlBridge(12, BASE, 6), RegisterFile(REGISTERS)

        async def testbench(ctx):
            await scenario(Processor(ctx, bridge.bus, wait))

        simulate(joined((bridge, registers), (bridge.port, registers.bus)), testbench)

    return start


@pytest.mark.parametrize("wait", [0, 3])
def test_single_words_are_written_and_read_back(run, wait):
    async def scenario(processor):
        for offset in (0x10, 0x2C, 0x14):
            assert await processor.write(offset, [offset * 0x01010101]) == OKAY
        for offset in (0x10, 0x2C, 0x14):
            assert await processor.read(offset) == [(offset * 0x01010101, OKAY)]
        assert await processor.read(0x00) == [(4, OKAY)]  # idle

    run(scenario, wait)


@pytest.mark.parametrize("wait", [0, 2])
def test_bursts_are_one_access_a_beat(run, wait):
    async def scenario(processor):
        words = list(range(0x100, 0x108))
        assert await processor.write(0x10, words) == OKAY
        assert await processor.read(0x10, 8) == [(word, OKAY) for word in words]
        assert await processor.write(0x20, [1, 2, 3], kind=FIXED) == OKAY
        assert await processor.read(0x20, 2, kind=FIXED) == [(3, OKAY)] * 2
        assert await processor.read(0x24) == [(0x105, OKAY)]

    run(scenario, wait)


def test_strobes_reach_the_registers(run):
    async def scenario(processor):
        await processor.write(0x10, [0x11223344])
        await processor.write(0x10, [0xAABBCCDD], strobe=0b0101)
        assert await processor.read(0x10) == [(0x11BB33DD, OKAY)]

    run(scenario)


def test_errors_of_a_beat_are_its_own_in_reads_and_the_bursts_in_writes(run):
    async def scenario(processor):
        await processor.write(0x2C, [7])
        assert await processor.read(0x2C, 2) == [(7, OKAY), (0, SLVERR)]
        assert await processor.write(0x2C, [8, 9]) == SLVERR
        assert await processor.write(0x28, [6, 5]) == OKAY  # the error is not kept
        assert await processor.read(0x28, 2) == [(6, OKAY), (5, OKAY)]

    run(scenario)


@pytest.mark.parametrize(("offset", "count"), [(0x40, 1), (0x1000_0000, 1), (0x3C, 2), (0x3C, 16), (-0x40, 1), (-4, 2)])
def test_what_lies_outside_the_window_is_refused_whole(run, offset, count):
    async def scenario(processor):
        before = await processor.read(0x10, 8)
        assert await processor.write(offset, [0xFFFF_FFFF] * count) == DECERR
        assert await processor.read(offset, count) == [(0, DECERR)] * count
        assert await processor.read(0x10, 8) == before

    run(scenario)


def test_a_wrapping_burst_is_refused_whole(run):
    async def scenario(processor):
        assert await processor.write(0x18, [1, 2, 3, 4], kind=WRAP) == SLVERR
        assert await processor.read(0x18, 4, kind=WRAP) == [(0, SLVERR)] * 4
        assert await processor.read(0x10, 8) == [(0, OKAY)] * 8

    run(scenario)


@pytest.mark.parametrize("base", [0x4000_0020, 1 << 32, -64])
def test_a_window_is_aligned_to_itself(base):
    with pytest.raises(ValueError, match="base_address must be a multiple of 0x40 below 4 GiB, not"):
        Axi3ControlBridge(12, base, 6)
