"""Pages of two sources into one channel."""

import random

import pytest

from nearflash.gateware.attention.control.page_merge import PageMerge
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS


def pages(rng, source, count):
    """Headers, and their codewords of three beats."""
    headers, beats = [], []
    for number in range(count):
        mask = rng.choice([1, 1 << 63, 0b101, rng.getrandbits(64) & rng.getrandbits(64) & rng.getrandbits(64) | 4])
        headers.append({"index": number, "page": source, "codewords": mask})
        for codeword in range(mask.bit_count()):
            beats += [
                {"data": source << 32 | number << 16 | codeword, "first": beat == 0, "last": beat == 2}
                for beat in range(3)
            ]
    return headers, beats


@pytest.mark.parametrize("stalls", STALLS)
def test_pages_stay_whole_and_none_is_lost(stalls):
    rng = random.Random(2)
    sources = [pages(rng, source, count) for source, count in ((0, 9), (1, 7))]
    inputs = {f"i_page__{s}": headers for s, (headers, _) in enumerate(sources)}
    inputs |= {f"i__{s}": beats for s, (_, beats) in enumerate(sources)}
    got = run_streams(PageMerge(), inputs, {"o_page": 16, "o": sum(len(b) for _, b in sources)}, stalls=stalls)
    expected = [dict(beat) for page in got["o_page"] for beat in _beats(sources, page)]
    assert got["o"] == [beat | {"uncorrectable": 0, "misdirected": 0} for beat in expected]
    assert sorted((page.page, page.index) for page in got["o_page"]) == sorted(
        (header["page"], header["index"]) for headers, _ in sources for header in headers
    )


def _beats(sources, page):
    return [beat for beat in sources[page.page][1] if beat["data"] >> 16 == page.page << 16 | page.index]


def test_sources_take_turns():
    one = ([{"page": source, "codewords": 1} for _ in range(4)] for source in range(2))
    beats = [{"last": 1}] * 4
    inputs = {f"i_page__{s}": headers for s, headers in enumerate(one)} | {"i__0": beats, "i__1": beats}
    got = run_streams(PageMerge(), inputs, {"o_page": 8, "o": 8})
    assert [page.page for page in got["o_page"]] == [1, 0] * 4
