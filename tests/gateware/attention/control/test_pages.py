"""Pages from memory: page_tags of their codewords, and their way to the channels."""

import random

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.control.pages import PageDelivery
from nearflash.gateware.attention.engine.interfaces import ContextRecord, PageHeader, RequestKind, RoutedHeader
from nearflash.gateware.nand.codeword import SealedTag
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS

CHANNELS, CONTEXTS = 3, 4
PAGE_TAGS = [random.Random(9).getrandbits(64) for _ in range(CONTEXTS)]


class Delivery(wiring.Component):
    """The delivery behind its broadcast, as streams."""

    def __init__(self):
        streams = {"context": In(stream.Signature(ContextRecord)), "i": In(stream.Signature(RoutedHeader)),
                   "i_codeword": In(stream.Signature(CodewordBeat)), "o_page_tag": Out(stream.Signature(SealedTag)),
                   "o_page": Out(stream.Signature(PageHeader)).array(CHANNELS),
                   "o": Out(stream.Signature(CodewordBeat)).array(CHANNELS)}  # fmt: skip
        super().__init__(streams)

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = inner = PageDelivery(CHANNELS, CONTEXTS)
        seen = Signal(range(CONTEXTS + 1))
        with m.If(self.context.valid):
            m.d.sync += seen.eq(seen + 1)
        known = seen == CONTEXTS  # pages come when all contexts have
        m.d.comb += [inner.i.payload.eq(self.i.payload), inner.i.valid.eq(self.i.valid & known)]
        m.d.comb += self.i.ready.eq(inner.i.ready & known)
        wiring.connect(m, wiring.flipped(self.i_codeword), inner.i_codeword)
        wiring.connect(m, inner.o_page_tag, wiring.flipped(self.o_page_tag))
        for index in range(CHANNELS):
            wiring.connect(m, inner.o_page[index], wiring.flipped(self.o_page[index]))
            wiring.connect(m, inner.o[index], wiring.flipped(self.o[index]))
        m.d.comb += [self.context.ready.eq(1), inner.i_context.valid.eq(self.context.valid)]
        m.d.comb += inner.i_context.record.eq(self.context.payload)
        return m


def page(rng):
    mask = rng.choice([1, 1 << 63, 0b1101, rng.getrandbits(8) << rng.randrange(50) | 2])
    return rng.randrange(CHANNELS), {
        "context": rng.randrange(CONTEXTS), "kind": rng.choice(list(RequestKind)), "index": rng.getrandbits(20),
        "block": 5, "page": 6, "expected": 7, "codewords": mask, "rows": rng.getrandbits(64),
    }  # fmt: skip


@pytest.mark.parametrize("stalls", STALLS)
def test_pages_reach_their_channels(stalls):
    rng = random.Random(4)
    pages = [page(rng) for _ in range(12)]
    numbers = [(channel, header, n) for channel, header in pages for n in range(64) if header["codewords"] >> n & 1]
    page_tags = [
        {"page": {"page_tag": PAGE_TAGS[header["context"]], "index": header["index"],
                  "kind": header["kind"] is RequestKind.INDEX}, "number": n}
        for _, header, n in numbers
    ]  # fmt: skip
    beats = [
        (channel, {"data": rng.getrandbits(64), "first": beat == 0, "last": beat == 4, "uncorrectable": 0,
                   "misdirected": 1})
        for channel, _, _ in numbers for beat in range(5)
    ]  # fmt: skip
    contexts = [{"context": c, "page_tag": page_tag} for c, page_tag in enumerate(PAGE_TAGS)]
    outputs = {"o_page_tag": len(page_tags)}
    for c in range(CHANNELS):
        outputs[f"o_page__{c}"] = sum(channel == c for channel, _ in pages)
        outputs[f"o__{c}"] = sum(channel == c for channel, _ in beats)
    got = run_streams(
        Delivery(), {"context": contexts, "i": [{"channel": channel, "header": header} for channel, header in pages],
                     "i_codeword": [beat for _, beat in beats]}, outputs, stalls=stalls,
    )  # fmt: skip
    assert got["o_page_tag"] == page_tags
    for c in range(CHANNELS):
        assert got[f"o_page__{c}"] == [header for channel, header in pages if channel == c]
        assert got[f"o__{c}"] == [beat for channel, beat in beats if channel == c]
