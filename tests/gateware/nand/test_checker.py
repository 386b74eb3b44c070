import numpy as np
import pytest

from nearflash.gateware.nand.checker import CodewordChecker
from nearflash.model.nand.codeword import Checked, decode, raw_codewords
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS, Stall, StallPattern
from nearflash.sim.verilator.ports import words_from_integers

BITS = 8 * 550
BEAT_FIELDS = (("data", 64), ("first", 1), ("last", 1), ("number", 6), ("place", 5), ("lun", 8), ("row", 32),
               ("final", 1), ("failed", 1))  # fmt: skip


def packed(fields: tuple[tuple[str, int], ...], item: dict[str, int]) -> int:
    value = start = 0
    for name, width in fields:
        value |= int(item[name]) << start
        start += width
    return value


def expected(page) -> Checked:
    return decode(page.raw, page.row, page.lun, page.page_tag, page.index, page.kind)


def run(lun, channels, stalls="none", seed=0, failed=()) -> None:
    """Pages through the channels; all that comes out equals the model."""
    inputs, outputs = {}, {}
    for channel, pages in enumerate(channels):
        beats = [packed(BEAT_FIELDS, beat) for page in pages for beat in page.beats(failed)]
        page_tags = [packed((("page_tag", 64), ("index", 20), ("kind", 1)), page.tag_fields) for page in pages]
        inputs[f"i__{channel}"] = words_from_integers(beats, 119)
        inputs[f"i_page_tag__{channel}"] = words_from_integers(page_tags, 85)
        outputs[f"o__{channel}"] = 65 * sum(len(page.raw) for page in pages)
    found = lun.run(inputs, outputs, stalls=stalls, seed=seed, timeout_cycles=500 * sum(outputs.values()))
    for channel, pages in enumerate(channels):
        words = found[f"o__{channel}"].reshape(-1, 65, 3)
        start = 0
        for page in pages:
            compare(words[start : start + len(page.raw)], page, failed)
            start += len(page.raw)


def compare(words, page, failed) -> None:
    model = expected(page)
    flags = words[:, :, 2]
    uncorrectable = model.uncorrectable.copy()
    uncorrectable[list(failed)] = True
    assert (flags & 1 == (np.arange(65) == 0)).all() and (flags >> 1 & 1 == (np.arange(65) == 64)).all()
    assert (flags >> 2 & 1 == uncorrectable[:, None]).all()
    assert (flags >> 3 & 1 == (model.misdirected & ~uncorrectable)[:, None]).all()
    good = ~uncorrectable & ~model.misdirected
    data = np.ascontiguousarray(words[:, :, :2]).view("<u8")[..., 0]
    np.testing.assert_array_equal(data[good], page.content[good])
    mine = np.hstack([model.aux, model.data]).view("<u8")
    np.testing.assert_array_equal(data[good], mine[good])


@pytest.mark.parametrize("stalls", [*STALLS, StallPattern(sink=Stall(95, burst_cycles=400))])
def test_errors_of_every_kind(channels_unit, make_page, stalls):
    """0 to 20 errors, scattered, in CRC and parity, in bursts, in the pad; on two channels at once."""
    rng = np.random.default_rng(5)
    pages = [make_page(21, seed) for seed in range(4)]
    for number, page in enumerate(pages):
        low, span = ((0, BITS), (8 * 520, BITS - 8 * 520), (8 * 524, 208), (0, BITS))[number % 4]
        for codeword in range(21):
            start = low + (rng.integers(span - 32) if number % 4 == 3 else 0)
            page.flip(codeword, start + rng.choice(32 if number % 4 == 3 else span, codeword, replace=False))
        page.raw[number % 21, 550:] ^= 0xFF
    run(channels_unit, [pages[:2], pages[2:]], stalls, seed=2)


def test_foreign_and_failed(channels_unit, make_page):
    """A page of another page_tag is misdirected, with bit errors uncorrectable; a failed lun's are uncorrectable."""
    pages = [make_page(6, seed) for seed in (1, 2, 3)]
    stranger = make_page(6, 4)
    pages[1].raw = raw_codewords(stranger.sealed, pages[1].row, pages[1].lun)
    pages[1].flip(3, np.array([17]))
    found = expected(pages[1])
    assert found.misdirected.tolist() == [1, 1, 1, 0, 1, 1] and found.uncorrectable.tolist() == [0, 0, 0, 1, 0, 0]
    run(channels_unit, [pages, pages])
    pages[0].raw[2] = 0
    run(channels_unit, [pages[:1], pages[2:]], failed=(2,))


def test_owner_and_place_matter(channels_unit, make_page):
    """Codewords from the middle of a page, by number and place."""
    page = make_page(8, 9)
    page.raw = page.raw[::-1].copy()
    found = expected(page)
    assert not found.errors.any() or found.uncorrectable.any()
    run(channels_unit, [[page], []])


@pytest.mark.parametrize(
    ("rate", "pages"),
    [(1e-4, 10), *(pytest.param(rate, 400, marks=pytest.mark.full) for rate in (1e-6, 1e-4, 1e-3, 3e-3))],
)
def test_random_bit_errors(channels_unit, make_page, rate, pages):
    rng = np.random.default_rng(6)
    stored = [make_page(32, seed) for seed in range(pages)]
    for page in stored:
        page.raw[:, :550] ^= np.packbits(rng.random((32, BITS)) < rate, axis=1, bitorder="little")
    run(channels_unit, [stored[::2], stored[1::2]])


def test_full_rate_latency_and_events(make_page):
    page = make_page(5, 1)
    checker = CodewordChecker()
    streams = {"i": page.beats(), "i_page_tag": [page.tag_fields]}
    cycles = transfer_cycles(checker, streams, {"o": 5 * 65})
    assert cycles["i"][-1] - cycles["i"][0] == 5 * 69 - 1
    assert cycles["o"][0] - cycles["i"][68] == CodewordChecker.LATENCY
    assert cycles["o"][-1] - cycles["i"][-1] == CodewordChecker.LATENCY + 64


def test_aside_codewords_leave_with_their_owner_block(make_page):
    page = make_page(3, 5)
    block = [page.page_tag.block(page.index, page.kind, number) for number in range(3)]
    inputs = {"i": page.beats(), "i_page_tag": [page.tag_fields]}
    found = run_streams(CodewordChecker(), inputs, {"o_aside": 3 * 68}, stalls="both", hold={"aside": 1})["o_aside"]
    tagged = [np.frombuffer(page_tag + sealed[:524].tobytes() + bytes(4), "<u8") for page_tag, sealed in
             zip(block, page.sealed, strict=True)]  # fmt: skip
    words = np.array([beat.data for beat in found], "<u8").reshape(3, 68)
    words[:, 67] &= (1 << 32) - 1  # parity lies behind the CRC
    np.testing.assert_array_equal(words, np.stack(tagged))
    assert not any(beat.corrected | beat.uncorrectable for beat in found)
