"""Stored codewords and the streams that carry them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Cat, Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.gateware.nand import codeword
from nearflash.gateware.nand.bch.share import CorrectorShare
from nearflash.gateware.nand.checker import CodewordChecker
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.gateware.nand.link import RawBeat
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.model.nand.codeword import raw_codewords, seal
from nearflash.sim.verilator.streams import StreamUnit

BITS = 8 * 550


@dataclass
class Page:
    """Codewords of one page, and where they are stored."""

    page_tag: PageTag
    index: int
    kind: PageKind
    row: int
    lun: int
    content: np.ndarray
    """(N, 65) words: aux, then data."""
    sealed: np.ndarray
    """(N, 528) bytes."""
    raw: np.ndarray
    """(N, 552) bytes; tests put bit errors here."""

    @property
    def tag_fields(self) -> dict[str, int]:
        """As gateware.nand.codeword.PageTag."""
        page_tag = int.from_bytes(self.page_tag.block(0, PageKind.TOKEN, 0)[:8], "little")
        return {"page_tag": page_tag, "index": self.index, "kind": int(self.kind)}

    def beats(self, failed: tuple[int, ...] = ()) -> list[dict[str, int]]:
        """The raw codewords as one request."""
        count = len(self.raw)
        return [
            {
                "data": int(word), "first": beat == 0, "last": beat == 68, "number": number, "place": number,
                "lun": self.lun, "row": self.row, "final": number == count - 1, "failed": number in failed,
            }
            for number, words in enumerate(self.raw.view("<u8"))
            for beat, word in enumerate(words)
        ]  # fmt: skip

    def flip(self, number: int, bits: np.ndarray) -> None:
        """Bit errors in one raw codeword."""
        for bit in bits:
            self.raw[number, bit // 8] ^= 1 << bit % 8


@pytest.fixture(scope="session")
def make_page() -> Callable[..., Page]:
    """A page of random content: make_page(codewords, seed)."""

    def make(count: int, seed: int) -> Page:
        rng = np.random.default_rng(seed)
        content = rng.integers(0, 256, (count, 520), np.uint8)
        page_tag = PageTag(int(rng.integers(1 << 32)), int(rng.integers(1 << 16)), int(rng.integers(1 << 16)))
        index, kind = int(rng.integers(1 << 20)), PageKind(int(rng.integers(2)))
        row, lun = int(rng.integers(1 << 32)), int(rng.integers(256))
        sealed = seal(page_tag, index, kind, content[:, 8:], content[:, :8])
        return Page(page_tag, index, kind, row, lun, content.view("<u8"), sealed, raw_codewords(sealed, row, lun))

    return make


class Channels(wiring.Component):
    """CodewordCheckers that share one corrector: streams `i__0`, `i_page_tag__0`, `o__0`, …"""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(
            {
                "i": In(stream.Signature(RawBeat)).array(count),
                "i_page_tag": In(stream.Signature(codeword.PageTag)).array(count),
                "o": Out(stream.Signature(CodewordBeat)).array(count),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.share = share = CorrectorShare(self.count)
        for channel in range(self.count):
            m.submodules[f"checker_{channel}"] = checker = CodewordChecker()
            wiring.connect(m, wiring.flipped(self.i[channel]), checker.i)
            wiring.connect(m, wiring.flipped(self.i_page_tag[channel]), checker.i_page_tag)
            wiring.connect(m, checker.o, wiring.flipped(self.o[channel]))
            wiring.connect(m, checker.o_syndromes, share.i[channel])
            wiring.connect(m, share.o[channel], checker.i_errors)
        return m


@pytest.fixture(scope="session")
def channels_unit() -> StreamUnit:
    """Two channels that share one corrector, Verilated."""
    return StreamUnit(Channels(2), "nfc-channels")


class WithPulses(wiring.Component):
    """A component with the same streams; its outputs `names` come as items of the stream `pulses`, first name bit 0."""

    def __init__(self, inner: Any, names: tuple[str, ...]) -> None:
        self.inner, self.names = inner, names
        streams = {name: member for name, member in inner.signature.members.items() if name not in names}
        super().__init__({**streams, "pulses": Out(stream.Signature(len(names)))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.inner = self.inner
        m.submodules.queue = queue = StreamQueue(len(self.names), 64)
        for name, member in self.inner.signature.members.items():
            if name not in self.names:
                ours, theirs = getattr(self, name), getattr(self.inner, name)
                pair = (wiring.flipped(ours), theirs) if member.flow == In else (theirs, wiring.flipped(ours))
                wiring.connect(m, *pair)
        m.d.comb += queue.i.payload.eq(Cat(getattr(self.inner, name) for name in self.names))
        m.d.comb += queue.i.valid.eq(queue.i.payload.any())
        wiring.connect(m, queue.o, wiring.flipped(self.pulses))
        return m


@pytest.fixture(scope="session")
def with_pulses() -> Callable[..., WithPulses]:
    """with_pulses(component, names): see WithPulses."""
    return WithPulses
