"""The buffer at a processor system's ports: what it carries, and that its two sides have no logic in common."""

import random

import pytest

from nearflash.gateware.bus.axi3_buffer import Axi3Buffer

CHANNELS = {
    "ar": ("addr", "len"),
    "aw": ("addr", "len"),
    "w": ("data", "strb", "last"),
    "r": ("data", "resp", "last"),
    "b": ("resp",),
}
BITS = {"addr": 32, "len": 4, "data": 64, "strb": 8, "last": 1, "resp": 2}


@pytest.fixture
def carried(simulate, channel):
    """Send items over every channel of a buffer; return {channel: items} as they came out, and the cycles it took."""

    def run(items, percent=0):
        dut = Axi3Buffer(64, 6)
        ways = {name: (dut.bus, dut.port) if name in "rb" else (dut.port, dut.bus) for name in CHANNELS}
        senders = [channel(ways[name][0], name, CHANNELS[name], percent, list(items[name])) for name in CHANNELS]
        receivers = {name: channel(ways[name][1], name, CHANNELS[name], percent) for name in CHANNELS}
        cycles = 0

        async def wait(ctx):
            nonlocal cycles
            while any(len(receivers[name].items) < len(items[name]) for name in CHANNELS) and cycles < 3000:
                await ctx.tick()
                cycles += 1
            await ctx.tick().repeat(10)

        simulate(dut, wait, *(one.send for one in senders), *(one.receive for one in receivers.values()))
        return {name: receivers[name].items for name in CHANNELS}, cycles

    return run


def some(count, seed=7):
    chance = random.Random(seed)
    return {name: [tuple(chance.getrandbits(BITS[field]) for field in fields) for _ in range(count)]
            for name, fields in CHANNELS.items()}  # fmt: skip


@pytest.mark.parametrize("percent", [0, 30, 70])
def test_every_channel_carries_its_items_in_order(carried, percent):
    items = some(100)
    assert carried(items, percent)[0] == items


def test_data_move_a_beat_a_cycle(carried):
    items = {name: [] for name in CHANNELS} | {name: some(400)[name] for name in ("w", "r")}
    assert carried(items)[1] < 410


def test_no_output_depends_on_an_input_of_the_same_cycle(simulate):
    # Regression: the ready of a Zynq-7000's port, 1.3 ns behind the clock and far from the kernel, passed six LUTs.
    dut = Axi3Buffer(64, 6)
    inputs = [*(getattr(dut.port, f"{name}valid") for name in ("ar", "aw", "w")), dut.port.rready, dut.port.bready,
              *(getattr(dut.bus, f"{name}ready") for name in ("ar", "aw", "w")), dut.bus.rvalid, dut.bus.bvalid,
              dut.port.araddr, dut.port.wdata, dut.bus.rdata, dut.bus.bresp]  # fmt: skip
    outputs = [*(getattr(dut.bus, f"{name}valid") for name in ("ar", "aw", "w")), dut.bus.rready, dut.bus.bready,
               *(getattr(dut.port, f"{name}ready") for name in ("ar", "aw", "w")), dut.port.rvalid, dut.port.bvalid,
               dut.bus.araddr, dut.bus.wdata, dut.port.rdata, dut.port.bresp]  # fmt: skip
    chance = random.Random(3)

    async def poke(ctx):
        for _ in range(200):
            before = [ctx.get(signal) for signal in outputs]
            for signal in inputs:
                ctx.set(signal, chance.getrandbits(len(signal)))
            assert [ctx.get(signal) for signal in outputs] == before
            await ctx.tick()

    simulate(dut, poke)
