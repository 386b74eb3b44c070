"""Pages both ways, with stalls; what is wrong with them is told."""

import numpy as np
import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.gateware.nand.codeword import TaggedBeat
from nearflash.gateware.nand.pages.transfer import PageTask, PageTransfer
from nearflash.model.nand.codeword import raw_codewords
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.sim.verilator.streams import StreamUnit

OWNER, INDEX, ROW, UNIT = PageTag(0x01020304, 7, 9), 0x54321, 0x123456, 3
UNCORRECTABLE, MISDIRECTED = 1, 2


class Pages(wiring.Component):
    """PageTransfer with its tasks as a stream, and what was wrong with each page as another."""

    i: In(stream.Signature(PageTask))
    o: Out(stream.Signature(2))
    i_memory: In(stream.Signature(64))
    o_memory: Out(stream.Signature(64))
    i_nand: In(stream.Signature(TaggedBeat))
    o_nand: Out(stream.Signature(64))

    def elaborate(self, platform):
        m = Module()
        m.submodules.transfer = inner = PageTransfer()
        for name in ("i_memory", "i_nand"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
        for name in ("o_memory", "o_nand"):
            wiring.connect(m, getattr(inner, name), wiring.flipped(getattr(self, name)))
        running = Signal()
        m.d.comb += [
            inner.task.eq(self.i.payload),
            inner.start.eq(self.i.valid & ~running & ~self.o.valid),
            self.o.payload.eq(Cat(inner.uncorrectable, inner.misdirected)),
            self.i.ready.eq(inner.done),
        ]
        with m.If(inner.start):
            m.d.sync += running.eq(1)
        with m.If(inner.done):
            m.d.sync += [running.eq(0), self.o.valid.eq(1)]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m


@pytest.fixture(scope="module")
def lun():
    """Verilated."""
    return StreamUnit(Pages(), "pages-transfer")


def task(codewords, *, read=0, keep=1, second=0):
    page_tag = int.from_bytes(OWNER.block(0, PageKind.TOKEN, 0)[:8], "little")
    page = {"page_tag": page_tag, "index": INDEX, "kind": 0}
    fields = {"read": read, "keep": keep, "page_tag": page, "second": second, "codewords": codewords, "lun": UNIT,
              "row": ROW}  # fmt: skip
    return PageTask.const(fields).as_bits()


def run(lun, tasks, memory, nand, outputs, stalls="none"):
    """Items of the outputs, by name."""
    inputs = {
        "i": words_from_integers(tasks, PageTask.as_shape().size),
        "i_memory": np.array(memory, np.uint64),
        "i_nand": words_from_integers(nand, 66),
    }
    counts = {name: count for name, count in zip(("o", "o_nand", "o_memory"), outputs, strict=True)}
    return {name: items.tolist() for name, items in lun.run(inputs, counts, stalls=stalls).items()}


def words(array):
    return [int(word) for word in np.ascontiguousarray(array).view("<u8").ravel()]


def tagged(sealed, *, corrected=(), uncorrectable=()):
    """Beats from NAND: two of an page tag that does not matter, 66 with parity behind the CRC."""
    parity = 0xDEADBEEF << 32
    return [
        (data | parity * (beat == 67)) | (at in corrected) << 64 | (at in uncorrectable) << 65
        for at, codeword in enumerate(sealed)
        for beat, data in enumerate([1, 2, *words(codeword)])
    ]


def page(make_sealed, codewords, second, seed):
    return make_sealed(OWNER, INDEX, PageKind.TOKEN, codewords, second, seed)


@pytest.mark.parametrize("stalls", STALLS)
def test_programs_and_reads_equal_the_model(lun, make_sealed, stalls):
    first, second, large = (page(make_sealed, *which) for which in ((8, False, 1), (8, True, 2), (32, False, 7)))
    tasks = [task(8), task(8, read=1, second=1), task(8, second=1), task(32), task(32, read=1)]
    memory, nand = [*words(first), *words(second), *words(large)], tagged(second) + tagged(large)
    found = run(lun, tasks, memory, nand, (5, 48 * 69, 40 * 66), stalls)
    expected = [raw_codewords(one, ROW, UNIT) for one in (first, second, large)]
    assert found["o_nand"] == words(np.concatenate(expected))
    assert found["o_memory"] == words(second) + words(large)
    assert found["o"] == [0] * 5


def test_what_is_wrong_is_told_of_its_page(lun, make_sealed):
    good, spoilt = page(make_sealed, 8, False, 3), page(make_sealed, 8, False, 3)
    spoilt[5, 100] ^= 1
    nand = [
        *tagged(good, corrected=(2,)),
        *tagged(spoilt),
        *tagged(good),
        *tagged(spoilt, corrected=(5,)),
        *tagged(spoilt, uncorrectable=(5,)),
    ]
    tasks = [*[task(8, read=1)] * 5, task(8), task(8)]
    found = run(lun, tasks, words(spoilt) + words(good), nand, (7, 16 * 69, 40 * 66))
    assert found["o"] == [0, MISDIRECTED, 0, UNCORRECTABLE, UNCORRECTABLE, MISDIRECTED, 0]


def test_a_page_that_is_not_kept_moves_all_the_same(lun, make_sealed):
    good = page(make_sealed, 8, False, 4)
    tasks = [task(8, keep=0), task(8), task(8, read=1, keep=0), task(8, read=1)]
    nand = tagged(page(make_sealed, 8, False, 5)) + tagged(good)
    found = run(lun, tasks, words(good), nand, (4, 16 * 69, 8 * 66))
    assert found["o_nand"][8 * 69 :] == words(raw_codewords(good, ROW, UNIT))
    assert found["o_memory"] == words(good)
    assert found["o"][1] == found["o"][3] == 0


@pytest.mark.parametrize(("read", "cycles"), [(0, 138), (1, 68)])
def test_cycles_a_codeword(lun, make_sealed, read, cycles):
    good, took = page(make_sealed, 32, False, 6), []
    for codewords in (8, 32):
        memory, nand = ([], tagged(good[:codewords])) if read else (words(good[:codewords]), [])
        outputs = (1, 0, 66 * codewords) if read else (1, 69 * codewords, 0)
        run(lun, [task(codewords, read=read)], memory, nand, outputs)
        took.append(lun.cycles)
    assert took[1] - took[0] == 24 * cycles
