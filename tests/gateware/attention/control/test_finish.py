"""Finish against the model, with channels, a memory behind both ports, and the walker's broadcast."""

import random
from collections import deque

import numpy as np
import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.descriptor import HeadCompletion
from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.finish import Finish
from nearflash.model.attention.gather import Gathered, finish

CHANNELS = 3
CONFIG = AttendConfig(
    "small", channels=CHANNELS, heads_per_beat=1, contexts=4, gather_slots=2, query_rows=64, score_blocks=1,
    score_entries=1024, selector_keys=256, luns=0, page_bytes=4096, clock_hz=1,
)  # fmt: skip
DIM, MEAN, OUT, COMPLETIONS, SIZE = 12, 0x100, 0x1000, 0x3000, 0x4000


NONE = Fault(0)


class Bench:
    """Runs commands one behind the other; `memory` is what lies behind both ports, `bad` answered with SLVERR."""

    def __init__(self, pause=0, bad=range(0)):
        self.dut, self.memory, self.bad = Finish(CONFIG), bytearray(SIZE), bad
        self.rng, self.pause = random.Random(3), pause
        self.drained = []

    def stall(self):
        return self.rng.random() < self.pause

    async def read_slave(self, ctx):
        bus, bursts = self.dut.read_bus, deque()
        ctx.set(bus.arready, 1)
        async for *_, arvalid, address, length in ctx.tick().sample(bus.arvalid, bus.araddr, bus.arlen):
            if ctx.get(bus.rvalid):
                bursts[0][1] -= 1
                bursts[0][0] += 8
                if not bursts[0][1]:
                    bursts.popleft()
            if arvalid:
                bursts.append([address, length + 1])
            ctx.set(bus.rvalid, bool(bursts) and not self.stall())
            if bursts:
                address, left = bursts[0]
                ctx.set(bus.rdata, int.from_bytes(self.memory[address : address + 8], "little"))
                ctx.set(bus.rlast, left == 1)
                ctx.set(bus.rresp, 2 * (address in self.bad))

    async def write_slave(self, ctx):
        bus, addresses, answers = self.dut.write_bus, deque(), deque()
        ctx.set(bus.awready, 1)
        beats, burst = deque(), []
        async for *_, aw, address, w, ready, data, last, strobes, b in ctx.tick().sample(
            bus.awvalid, bus.awaddr, bus.wvalid, bus.wready, bus.wdata, bus.wlast, bus.wstrb, bus.bvalid & bus.bready
        ):
            if aw:
                addresses.append(address)
            if w and ready:
                assert strobes == 0xFF
                burst.append(data)
                if last:
                    beats.append(burst)
                    burst = []
            if b:
                answers.popleft()
            if addresses and beats:
                start = addresses.popleft()
                for index, word in enumerate(beats.popleft()):
                    if start not in self.bad:
                        self.memory[start + 8 * index : start + 8 * index + 8] = word.to_bytes(8, "little")
                answers.append(start in self.bad)
            ctx.set(bus.wready, not self.stall())
            ctx.set(bus.bvalid, bool(answers))
            ctx.set(bus.bresp, 2 * (bool(answers) and answers[0]))

    def channel(self, index, shares):
        """Answers each drain with this channel's items of the next head."""

        async def run(ctx):
            drain, partial = self.dut.o_drain[index], self.dut.i_partial[index]
            for items in shares:
                ctx.set(drain.ready, 1)
                (command,) = await ctx.tick().sample(drain.payload).until(drain.valid)
                ctx.set(drain.ready, 0)
                self.drained.append((index, command.slot, command.group, command.dim_rows))
                for total, maximum in items:
                    while self.stall():
                        await ctx.tick()
                    ctx.set(partial.payload, {"sum": total, "maximum": maximum})
                    ctx.set(partial.valid, 1)
                    await ctx.tick().until(partial.ready)
                    ctx.set(partial.valid, 0)

        return run

    def run(self, commands, heads, alphas):
        """Contexts freed. heads: by head with a drain, by channel, items; alphas: Alpha items."""
        dut, freed = self.dut, []

        async def control(ctx):
            ctx.set(dut.completions_address, COMPLETIONS)
            for item in alphas:
                ctx.set(dut.i_alpha.payload, item)
                ctx.set(dut.i_alpha.valid, 1)
                await ctx.tick()
            ctx.set(dut.i_alpha.valid, 0)
            for command, references in commands:
                record = {"context": command["context"], "slot": command["slot"], "references": references}
                ctx.set(dut.i_gather, {"valid": 1, "write": record})
                await ctx.tick()
                ctx.set(dut.i_gather.valid, 0)
                ctx.set(dut.i_command.payload, command)
                ctx.set(dut.i_command.valid, 1)
                await ctx.tick().until(dut.i_command.ready)
                ctx.set(dut.i_command.valid, 0)
                ctx.set(dut.o_free.ready, 1)
                (context,) = await ctx.tick().sample(dut.o_free.payload).until(dut.o_free.valid)
                ctx.set(dut.o_free.ready, 0)
                freed.append(context)

        simulator = Simulator(dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(control)
        for slave in (self.read_slave, self.write_slave):
            simulator.add_testbench(slave, background=True)
        for index in range(CHANNELS):
            simulator.add_testbench(self.channel(index, [head[index] for head in heads]), background=True)
        for cycles in range(300, 20_000, 300):
            simulator.run_until(cycles * 1e-6)
            if len(freed) == len(commands):
                break
        return freed

    def completion(self, index):
        return HeadCompletion.unpack(bytes(self.memory[COMPLETIONS + 32 * index :][:32]))

    def out(self, index, group):
        return np.frombuffer(bytes(self.memory[OUT + 512 * index :][: 2 * group * DIM]), np.uint16).reshape(group, DIM)


class Head:
    """Random sums of one head, split over the channels."""

    def __init__(self, seed, index, group, *, weighed=True, faults=NONE, low=False, drain=True):
        rng = random.Random(seed)
        self.group, self.index, self.weighed = group, index, weighed
        self.l = [rng.getrandbits(40) | 1 << 39 for _ in range(group)]
        self.n = [[rng.randrange(-9 * one, 9 * one) for _ in range(DIM)] for one in self.l]
        self.shares = [(rng.randrange(1, 1000), 1000 + h) if weighed else (1, 1) for h in range(group)]
        self.references = [rng.randrange(-100, 100) for _ in range(8)]
        self.maximum = [r - (9 if low and h == group - 1 else 8) for h, r in enumerate(self.references[:group])]
        self.items = self._split(rng)
        self.command = {
            "context": index % 4, "index": index, "drain": drain, "slot": index % 2, "weighed": weighed, "group": group,
            "dim_rows": DIM // 4, "v_mean_address": MEAN, "out_address": OUT + 512 * index, "entries": 77 + index,
            "pages": 1000 + index, "faults": int(faults),
        }  # fmt: skip

    def _split(self, rng):
        flat = [(one, m) for one, m in zip(self.l, self.maximum, strict=True)]
        flat += [(one, -2048) for row in self.n for one in row]
        channels = [[] for _ in range(CHANNELS)]
        for total, maximum in flat:
            parts = [rng.randrange(-(1 << 60), 1 << 60) for _ in range(CHANNELS - 1)]
            parts.append(total - sum(parts))
            best = rng.randrange(CHANNELS)
            for channel, part in enumerate(parts):
                channels[channel].append((part, maximum if channel == best else max(-2048, maximum - 5)))
        return channels

    @property
    def alphas(self):
        return [
            {"context": self.index % 4, "head": h, "selected": 55, "numerator": n, "denominator": d, "faults": 0}
            for h, (n, d) in enumerate(self.shares)
            if self.weighed
        ]

    def want(self, v_mean):
        gathered = Gathered(np.array(self.l, object), np.array(self.n, object), (0,) * self.group, Fault(0))
        alpha = np.array([np.float32(n) / np.float32(d) for n, d in self.shares], np.float32)
        return finish(gathered, alpha, v_mean).view(np.uint16)


V_MEAN = np.random.default_rng(5).standard_normal(DIM).astype(np.float32)


def run(heads, **options):
    bench = Bench(**options)
    bench.memory[MEAN : MEAN + 4 * DIM] = V_MEAN.tobytes()
    commands = [(head.command, head.references) for head in heads]
    drained = [head.items for head in heads if head.command["drain"]]
    freed = bench.run(commands, drained, [alpha for head in heads for alpha in head.alphas])
    assert freed == [head.command["context"] for head in heads]
    return bench


@pytest.mark.parametrize("pause", [0.6, pytest.param(0, marks=pytest.mark.full)])
def test_heads_equal_the_model(pause):
    heads = [Head(1, 0, 1), Head(2, 1, 8), Head(3, 2, 3, weighed=False), Head(4, 3, 2)]
    bench = run(heads, pause=pause)
    for index, head in enumerate(heads):
        np.testing.assert_array_equal(bench.out(index, head.group), head.want(V_MEAN))
        selected = 55 if head.weighed else 77 + index
        maximum = (*head.maximum, *[-32768] * (8 - head.group))
        assert bench.completion(index) == HeadCompletion(Fault(0), selected, 77 + index, 1000 + index, maximum)
    assert sorted(bench.drained) == sorted(
        (channel, head.command["slot"], head.group, DIM // 4) for head in heads for channel in range(CHANNELS)
    )


def test_faults_leave_no_output_and_do_not_touch_the_next_head():
    heads = [
        Head(1, 0, 2, low=True),
        Head(2, 1, 3, faults=Fault.REFERENCE_HIGH),
        Head(3, 2, 1, faults=Fault.DESCRIPTOR, drain=False),
        Head(4, 3, 2, faults=Fault.MISDIRECTED, low=True),
        Head(5, 4, 2, faults=Fault.REFERENCE_HIGH, low=True),
        Head(6, 5, 2),
    ]
    bench = run(heads)
    both = Fault.REFERENCE_HIGH | Fault.REFERENCE_LOW
    faults = [Fault.REFERENCE_LOW, Fault.REFERENCE_HIGH, Fault.DESCRIPTOR, Fault.MISDIRECTED, both, Fault(0)]
    for index, head in enumerate(heads[:5]):
        assert not bench.out(index, head.group).any()
        assert bench.completion(index).faults == faults[index]
    assert bench.completion(0).maximum[:2] == tuple(heads[0].maximum)
    assert (bench.completion(1).maximum[:3], bench.completion(1).selected) == (tuple(heads[1].maximum), 55)
    np.testing.assert_array_equal(bench.out(5, 2), heads[5].want(V_MEAN))


@pytest.mark.parametrize(("bad", "lost"), [(MEAN, 0), (OUT, 0), (COMPLETIONS, 1)])
def test_a_bus_error_is_this_heads_fault(bad, lost):
    heads = [Head(1, 0, 1), Head(2, 1, 1)]
    if bad == MEAN:
        heads[1].command["v_mean_address"] = MEAN + 0x400
    bench = run(heads, bad=range(bad, bad + 8))
    assert bench.completion(0).faults == (Fault(0) if lost else Fault.MEMORY)
    assert bench.completion(1).faults == Fault(0)
    assert not bench.out(0, 1).any() or lost


def test_port_message():
    with pytest.raises(ValueError, match="port_bits must be 64, not 128"):
        Finish(AttendConfig(**{**CONFIG.__dict__, "port_bits": 128}))
