import random

import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.pages import IndexFormat, IndexLayout, TokenLayout
from nearflash.gateware.attention.engine.beats import What
from nearflash.gateware.attention.engine.filter import BeatFilter
from nearflash.gateware.attention.engine.interfaces import RequestKind
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.ordered import Ordered

PAGE_BYTES, WORDS = 4096, 8
#: Contexts 0..3: d, n, interleaved, index format, T.
CONTEXTS = [
    (64, 16, False, IndexFormat.FP16, 512),
    (80, 12, True, IndexFormat.INT8, 48),
    (128, 8, True, IndexFormat.INT4, 1024),
    (256, 4, False, IndexFormat.FP16, 768),
]


def index_layout(context):
    dim, _, _, form, block_tokens = CONTEXTS[context]
    return IndexLayout(PAGE_BYTES, dim, block_tokens, form)


def record(context):
    dim, tokens, interleaved, form, block_tokens = CONTEXTS[context]
    index = index_layout(context)
    return {
        "context": context, "dim_rows": dim // 4, "group": 1, "group_tokens": tokens, "interleaved": interleaved,
        "block_tokens": block_tokens, "index_format": form, "index_rows": index.rows,
        "row_codewords": index.row_codewords, "page_codewords": PAGE_BYTES // 512,
    }  # fmt: skip


def token_request(rng, context, kind):
    """Wanted tokens, the codewords that hold them, and (what, token, row) of every beat of these codewords."""
    dim, tokens, interleaved, *_ = CONTEXTS[context]
    layout = TokenLayout(PAGE_BYTES, dim, tokens, interleaved)
    wanted = rng.sample(range(tokens), rng.randint(1, tokens))
    places = {
        byte // 8: (What.VALUE if value else What.KEY, token, row)
        for token in wanted
        for value in ((False, True) if kind is RequestKind.GATHER else (False,))
        for row, byte in enumerate(range(*layout.span(token, value=value), 8))
    }
    codewords = {beat // 64 for beat in places} | set(rng.sample(range(layout.pages * 8), 1))
    beats = {number: [places.get(64 * number + beat) for beat in range(64)] for number in sorted(codewords)}
    return {"context": context, "kind": kind, "rows": sum(1 << token for token in wanted)}, beats, dim // 4


def index_request(rng, context):
    form, block_tokens = CONTEXTS[context][3:]
    layout = index_layout(context)
    page = rng.randrange(layout.pages)
    wanted = sorted(rng.sample(range(layout.rows), rng.randint(1, min(3, layout.rows))))
    used = block_tokens * form.bits // 64
    beats = {}
    for row in wanted:
        for part in range(layout.row_codewords):
            numbers = range(64 * part, 64 * part + 64)
            found = [(What.ROW, page * layout.rows + row, n, part == 0) if n < used else None for n in numbers]
            beats[row * layout.row_codewords + part] = found
    header = {"context": context, "kind": RequestKind.INDEX, "rows": sum(1 << row for row in wanted), "page": page}
    return header, beats


def traffic(seed, count=24):
    """Headers, codeword beats, and the element beats and END marks that must come out."""
    rng = random.Random(seed)
    pages, stream, expected = [], [], []
    for number in range(count):
        context, kind = rng.randrange(4), rng.choice(list(RequestKind))
        if kind is RequestKind.INDEX:
            header, beats = index_request(rng, context)
        else:
            header, beats, dim_rows = token_request(rng, context, kind)
        pages.append({**header, "codewords": sum(1 << n for n in beats)})
        for places in beats.values():
            words = [rng.getrandbits(64) for _ in range(65)]
            flags = {"uncorrectable": 0, "misdirected": 0}
            stream += [{"data": w, "first": i == 0, "last": i == 64, **flags} for i, w in enumerate(words)]
            ticket = {"ticket": number % 4}
            if kind is RequestKind.INDEX:
                (_, channel, row, first) = places[0]
                expected.append({"what": What.AUX, **ticket, "data": words[0], "channel": channel, "first": first})
            for word, place in zip(words[1:], places, strict=True):
                if place and kind is RequestKind.INDEX:
                    _, channel, row, first = place
                    expected.append({"what": What.ROW, **ticket, "data": word, "channel": channel, "row": row,
                                     "first": first})  # fmt: skip
                elif place:
                    what, token, row = place
                    expected.append({"what": what, **ticket, "data": word, "token": token, "row": row,
                                     "first": row == 0, "last": row == dim_rows - 1})  # fmt: skip
        expected.append({"what": What.END, **ticket})
    return pages, stream, expected


@pytest.mark.parametrize("stalls", STALLS)
def test_wanted_beats_come_with_their_places(stalls):
    count = 24 if stalls == "none" else 8
    pages, beats, expected = traffic(5, count)
    outputs = {"o": len(expected), "o_request": len(pages)}
    contexts = [record(context) for context in range(4)]
    filter_ = Ordered(BeatFilter(4), {"i_page": ["i_context"]})
    inputs, hold = {"i_context": contexts, "i_page": pages, "i": beats}, {"i_page_after_i_context": 4}
    got = run_streams(filter_, inputs, outputs, stalls=stalls, hold=hold)
    for item, wanted in zip(got["o"], expected, strict=True):
        assert {name: item[name] for name in wanted} == wanted
    assert [item.ticket for item in got["o_request"]] == [number % 4 for number in range(len(pages))]


def test_latency():
    """From the one beat that is wanted to `o`, once its plan is there."""
    dut, found = BeatFilter(4), []

    async def testbench(ctx):
        ctx.set(dut.i_context, {"valid": 1, "record": record(0)})
        await ctx.tick()
        ctx.set(dut.i_context.valid, 0)
        ctx.set(dut.i_page.payload, {"context": 0, "kind": RequestKind.GATHER, "rows": 1, "codewords": 1})
        ctx.set(dut.i_page.valid, 1)
        ctx.set(dut.o_request.ready, 1)
        await ctx.tick()
        ctx.set(dut.i_page.valid, 0)
        await ctx.tick().repeat(12)
        ctx.set(dut.i.valid, 1)
        ctx.set(dut.i.payload, {"first": 1})
        await ctx.tick()
        ctx.set(dut.i.payload, {"data": 5})
        await ctx.tick()
        ctx.set(dut.i.valid, 0)
        for cycle in range(1, 8):
            if ctx.get(dut.o.valid):
                found.append((cycle, ctx.get(dut.o.payload.data)))
            ctx.set(dut.o.ready, 1)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    assert found == [(BeatFilter.LATENCY, 5)]
