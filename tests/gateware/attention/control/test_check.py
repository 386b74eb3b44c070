import dataclasses
import random

import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.pages import IndexFormat, IndexLayout, TokenLayout
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.check import DescriptorCheck

CONFIG = CONFIGS["attend-zynq7045"]
SHARED = dataclasses.replace(CONFIG, mask_beats=0)
GOOD = AttendDescriptor(
    Mode.PAGE | Mode.PROBABILITY, PageTag(7, 3, 5), 128, 5000, 4, 32, 40, 64, 16, True, 1024, IndexFormat.INT4, 8192,
    0.1275, 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, top_p=60000,
)  # fmt: skip


def derived(one, contexts=8):
    """By the ABI's layouts."""
    n, page = one.group_tokens, Mode.PAGE in one.mode
    layout = IndexLayout(one.page_bytes, one.dim, one.block_tokens, one.index_format)
    groups, covered = -(-one.tokens // n), one.tokens // one.block_tokens * one.block_tokens
    entries = groups if page else one.tokens
    first = max(one.tokens - one.local_window, 0)
    return {
        "dim_rows": one.dim // 4, "passes": -(-one.group // CONFIG.heads_per_beat),
        "limit_shift": (one.score_dims - 1).bit_length(), "page_codewords": one.page_bytes // 512,
        "row_codewords": layout.row_codewords, "index_rows": layout.rows, "index_pages": layout.pages,
        "blocks": covered // one.block_tokens, "tail_tokens": one.tokens - covered, "tail_group": covered // n,
        "groups": groups, "entries": entries,
        "local_entry": entries if one.local_window == 0 else first // n if page else first,
        "base_shift": (CONFIG.query_rows // contexts).bit_length() - 1,
    }  # fmt: skip


def run(descriptors, contexts=8, config=CONFIG):
    """(bad_field, bad, derived) of each, and its lines where heads take them."""
    unit, results = DescriptorCheck(config), []

    async def bench(ctx):
        ctx.set(unit.contexts, contexts)
        await ctx.tick().repeat(2)
        for one in descriptors:
            packed = one if isinstance(one, bytes) else one.pack()
            ctx.set(unit.descriptor.as_value(), int.from_bytes(packed, "little"))
            await ctx.tick().repeat(unit.SETTLE)
            bad_field = ctx.get(unit.bad_field)
            ctx.set(unit.start, 1)
            await ctx.tick()
            ctx.set(unit.start, 0)
            cycles = 0
            while not ctx.get(unit.done):
                await ctx.tick()
                cycles += 1
            assert cycles == 20 * unit.DIVISIONS
            await ctx.tick()
            lines = (ctx.get(unit.lines),) if config.mask_beats else ()
            results.append((bad_field, ctx.get(unit.bad), ctx.get(unit.derived), *lines))

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results


def legal(rng):
    dim, page_bytes = 4 * rng.randrange(1, 65), rng.choice([4096, 8192, 16384])
    interleaved, tokens = rng.random() < 0.5, rng.choice([1, 100, 4096, 5001])
    n = rng.choice([n for n in (4, 8, 12, 16, 32, 64) if n <= TokenLayout.capacity(page_bytes, dim, interleaved)])
    block = rng.choice([t for t in range(16, 1025, 16) if t % n == 0])
    return dataclasses.replace(
        GOOD, mode=rng.choice([Mode(0), Mode.PROBABILITY, Mode.PAGE, GOOD.mode]), dim=dim, page_bytes=page_bytes,
        tokens=tokens, group=1, score_dims=rng.randrange(1, dim + 1), top_k=rng.randrange(1, tokens + 1),
        local_window=rng.choice([0, 1, tokens, 10 * tokens, tokens // 2]), group_tokens=n, interleaved=interleaved,
        block_tokens=block, index_format=rng.choice(list(IndexFormat)), top_p=0, scale=2.0 ** rng.randrange(-14, 8),
    )  # fmt: skip


def test_legal_descriptors_and_what_follows_from_them():
    rng = random.Random(2)
    one = dataclasses.replace(GOOD, local_window=0)
    dense = dataclasses.replace(
        GOOD, mode=Mode.DENSE | Mode.REFERENCE, reference=(-2048, 2047), score_dims=0, top_k=0, top_p=0
    )
    largest = dataclasses.replace(GOOD, tokens=1 << 17, group=1, group_tokens=8, block_tokens=1024, page_bytes=4096)
    for contexts, work in ((8, [GOOD, one, *(legal(rng) for _ in range(12))]), (1, [largest]), (8, [dense])):
        for found, descriptor in zip(run(work, contexts), work, strict=True):
            assert found[:2] == (0, 0), descriptor
            if Mode.DENSE not in descriptor.mode:
                assert found[2] == derived(descriptor, contexts), descriptor


FIELD = [
    {"group": 0}, {"group": 9}, {"dim": 0}, {"dim": 260}, {"dim": 126}, {"tokens": 0}, {"tokens": (1 << 17) + 1},
    {"group_tokens": 0}, {"group_tokens": 18}, {"group_tokens": 68}, {"group_tokens": 20, "block_tokens": 960},
    {"interleaved": 2}, {"page_bytes": 2048}, {"page_bytes": 32768}, {"scale": 2.0**-15}, {"scale": 256.0},
    {"scale": -0.1}, {"scale": float("nan")}, {"q_address": 4}, {"out_address": 1 << 48}, {"token_table_address": 2},
    {"index_table_address": 1}, {"v_mean_address": 1 << 63}, {"score_dims": 0}, {"score_dims": 129}, {"top_k": 0},
    {"top_k": 5001}, {"block_tokens": 0}, {"block_tokens": 1040}, {"block_tokens": 24},
    {"mode": Mode.PAGE}, {"mode": 16}, {"mode": Mode.DENSE, "top_p": 0}, {"index_format": 3},
    {"mode": Mode.DENSE | Mode.REFERENCE, "reference": (0, 2048), "top_p": 0},
    {"mode": GOOD.mode | Mode.REFERENCE, "reference": (-2049,)},
]  # fmt: skip


@pytest.mark.parametrize("change", FIELD, ids=str)
def test_a_field_outside_its_range(change):
    (bad_field, bad, *_), (good_field, good, *_) = run([dataclasses.replace(GOOD, **change), GOOD])
    assert (bad_field, bad) == (1, 1)
    assert (good_field, good) == (0, 0)


@pytest.mark.parametrize(
    ("change", "contexts", "build"),
    [
        ({"block_tokens": 1024, "group_tokens": 12}, 8, CONFIG),  # T is no multiple of n
        ({"mode": Mode(0), "top_p": 0, "tokens": 2049}, 8, SHARED),  # 4 · 2,049 entries in 65,536 / 8
        ({"mode": Mode(0), "top_p": 0, "tokens": 16385}, 8, CONFIG),  # 4 · 16,385 entries in 65,536
        ({"mode": Mode(0), "top_p": 0, "tokens": 40000, "group": 1}, 1, CONFIG),  # more than selector_keys
    ],
)
def test_fields_that_do_not_fit_together(change, contexts, build):
    one = dataclasses.replace(GOOD, **change)
    (bad_field, bad, *_), *_ = run([one], contexts, build)
    assert (bad_field, bad) == (0, 1)


def test_a_head_takes_whole_lines_whatever_the_contexts():
    work = [dataclasses.replace(GOOD, mode=Mode(0), top_p=0, tokens=tokens, group=3) for tokens in (21844, 21845)]
    for contexts in (1, 32):
        found = run(work, contexts)
        assert [(bad, lines) for _, bad, _, lines in found] == [(0, 16383), (1, 16386)]
        assert [one.fits(CONFIG, contexts) for one in work] == [True, False]


def test_query_rows_of_a_context():
    whole = dataclasses.replace(
        GOOD, dim=256, group=8, group_tokens=4, score_dims=8, tokens=1000
    )  # 2 passes of 64 rows
    assert [found[:2] for contexts in (8, 16) for found in run([whole], contexts)] == [(0, 0), (1, 1)]


def test_rows_of_sums():
    """8 passes of 32 or 64 rows; the slots of all contexts hold 256."""
    fits = dataclasses.replace(GOOD, group=8, group_tokens=4, tokens=500, page_bytes=4096)
    work = [fits, dataclasses.replace(fits, dim=256)]
    build = dataclasses.replace(CONFIGS["attend-pynq-z2"], query_rows=512)
    assert [found[:2] for found in run(work, 1, build)] == [(0, 0), (1, 1)]
