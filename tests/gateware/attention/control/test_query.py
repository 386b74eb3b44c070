"""The query buffer with what hangs on it: keys of the channels, query rows, sums and their factors."""

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

from nearflash.gateware.attention.control.correction import ScaleCorrection
from nearflash.gateware.attention.control.dim_keys import DimKeys
from nearflash.gateware.attention.control.query import QueryBuffer
from nearflash.gateware.attention.control.rows import QueryWriter
from nearflash.model.attention.control.scan import logit_scales
from nearflash.model.attention.numerics.fp16 import order_key
from nearflash.verify.fixtures.query import query_rows

SCALE = np.float32(0.127)


def queries(seed, group, dim):
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((group, dim)) * 2.0 ** rng.integers(-20, 5, (1, dim))).astype(np.float16)
    q[rng.random((group, dim)) < 0.1] = 0
    q[0, 0], q[-1, 1] = -65504, 2.0**-24
    return q


class Run:
    """Loads q, walks over it twice, and collects what comes out."""

    def __init__(self, q, heads_per_beat, mask, *, dense=False):
        self.keys, self.rows, self.scales, self.cycles = [], [], {}, {}
        group, dim = q.shape
        top = Module()
        top.submodules.buffer = buffer = QueryBuffer(heads_per_beat)
        top.submodules.keys = keys = DimKeys()
        top.submodules.writer = writer = QueryWriter(heads_per_beat)
        top.submodules.correction = correction = ScaleCorrection()
        top.d.comb += [keys.i.eq(buffer.o), writer.i.eq(buffer.o)]
        top.d.comb += [correction.i.eq(writer.o), correction.i_valid.eq(writer.o_valid)]

        async def walk(ctx, write):
            ctx.set(buffer.write, write)
            ctx.set(buffer.walk, 1)
            await ctx.tick()
            ctx.set(buffer.walk, 0)
            cycles = 0
            for _ in range(2000):
                busy = ctx.get(buffer.busy)
                cycles += busy
                await ctx.tick()
                if not busy and (cycles := cycles + 1) > 80 + self.cycles.setdefault(write, cycles):
                    break

        async def bench(ctx):
            ctx.set(buffer.group, group)
            ctx.set(buffer.dim_rows, dim // 4)
            ctx.set(correction.scale, int(SCALE.view(np.uint32)))
            ctx.set(writer.base, 100)
            ctx.set(writer.dense, dense)
            await ctx.tick()
            ctx.set(buffer.load, 1)
            await ctx.tick()
            ctx.set(buffer.load, 0)
            for word in q.reshape(-1).view(np.uint64):
                ctx.set(buffer.i.payload, int(word))
                ctx.set(buffer.i.valid, 1)
                await ctx.tick().until(buffer.i.ready)
            ctx.set(buffer.i.valid, 0)
            self.nonfinite = ctx.get(buffer.nonfinite)
            await walk(ctx, 0)
            ctx.set(writer.begin, 1)
            await ctx.tick()
            ctx.set(writer.begin, 0)
            for row in range(dim // 4):
                ctx.set(writer.mask, {"mask": sum(int(mask[4 * row + k]) << k for k in range(4))})
                ctx.set(writer.mask_valid, 1)
                await ctx.tick()
            ctx.set(writer.mask_valid, 0)
            writing.append(1)
            await walk(ctx, 1)

        writing = []

        async def collect(ctx):
            while True:
                _, _, *values = await ctx.tick().sample(
                    keys.o_valid, keys.o, writer.query_valid, writer.query, correction.o_valid, correction.o
                )
                if values[0] and not writing:
                    self.keys.append(values[1])
                if values[2] and writing:
                    self.rows.append(values[3])
                if values[4] and writing:
                    self.scales[int(values[5].head)] = int(values[5].scale)

        simulator = Simulator(top)
        simulator.add_clock(1e-6)
        simulator.add_testbench(bench)
        simulator.add_testbench(collect, background=True)
        simulator.run()


@pytest.mark.parametrize(
    ("group", "dim", "heads_per_beat"),
    [
        (1, 64, 1), (3, 32, 2), (8, 8, 4), (5, 64, 8),
        *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((4, 128, 4), (2, 256, 1))),
    ],
)  # fmt: skip
def test_keys_rows_and_scales(group, dim, heads_per_beat):
    q = queries(dim, group, dim)
    chosen = np.random.default_rng(group).random(dim) < 0.3
    chosen[0] = False
    run = Run(q, heads_per_beat, chosen)
    sums = np.abs(q.astype(np.float64)).sum(axis=0)
    expected = order_key((sums / 8).astype(np.float16))
    assert [int(key) for row in run.keys for key in row["keys"]] == list(map(int, expected))
    assert [int(row.last) for row in run.keys] == [0] * (dim // 4 - 1) + [1]

    assert run.rows == query_rows(q, set(np.flatnonzero(chosen)), heads_per_beat, base=100)
    scales = logit_scales(q, np.flatnonzero(chosen), SCALE).view(np.uint32)
    assert run.scales == {head: int(scale) for head, scale in enumerate(scales)}
    assert not run.nonfinite


def test_no_channel_chosen_leaves_the_scale():
    q = queries(1, 2, 16)
    q[1] = 0
    run = Run(q, 1, np.zeros(16, bool))
    assert set(run.scales.values()) == {int(SCALE.view(np.uint32))}


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite(bad):
    q = queries(1, 2, 16)
    q[1, 15] = bad
    assert Run(q, 2, np.zeros(16, bool), dense=True).nonfinite
