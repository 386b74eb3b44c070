"""Reads of a head, against sets of codewords."""

import numpy as np
import pytest

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.traffic import HeadReads, traffic


def settings(**kinds):
    defaults = dict(score_dims=6, top_k=8, group_tokens=16, block_tokens=256)
    return HeadSettings(Mode(0), kinds.pop("dim", 128), 0.2, **{**defaults, **kinds})


@pytest.mark.parametrize(
    ("dim", "interleaved", "n"), [(128, False, 16), (128, True, 8), (64, False, 32), (80, True, 12)]
)
def test_gather_reads_the_codewords_of_chosen_tokens(dim, interleaved, n):
    rng = np.random.default_rng(dim)
    kind = settings(dim=dim, interleaved=interleaved, group_tokens=n, block_tokens=240 if n == 12 else 256)
    chosen = rng.random(501) < 0.1
    found = traffic(kind, np.empty(0, np.int64), chosen).gather
    asked = {(t // n, codeword) for t in np.flatnonzero(chosen) for codeword in kind.token_layout.codewords(t % n)}
    assert found == HeadReads(len({group for group, _ in asked}), len(asked), int(chosen.sum()) * 4 * dim)


@pytest.mark.parametrize(
    ("index", "block", "rows", "row_codewords"),
    [(IndexFormat.FP16, 1024, 2, 4), (IndexFormat.INT4, 1024, 8, 1), (IndexFormat.INT8, 256, 8, 1)],
)
def test_index_reads_the_rows_of_its_dims(index, block, rows, row_codewords):
    kind = settings(index_format=index, block_tokens=block)
    dims = np.array([0, 1, 7, 8, 64, 127])
    assert kind.index_layout.rows == rows
    found = traffic(kind, dims, np.zeros(2 * block + 40, bool))
    pages = len({c // rows for c in dims.tolist()})
    assert found.index == HeadReads(2 * pages, 2 * 6 * row_codewords, 2 * 6 * block * index.bits // 8)
    assert found.suffix == HeadReads(3, 2 * 8 + 4, 40 * 256), "K alone: 16, 16 and 8 tokens of 256 bytes"
    assert found.all == HeadReads(2 * pages + 3, 12 * row_codewords + 20, found.index.used_bytes + 40 * 256)


def test_dense_has_no_scan():
    kind = HeadSettings(Mode.DENSE | Mode.REFERENCE, 128, 0.2, reference=(0,), interleaved=True, group_tokens=8)
    found = traffic(kind, np.empty(0, np.int64), np.ones(100, bool))
    assert found.index == found.suffix == HeadReads(0, 0, 0) and found.gather == HeadReads(13, 100, 51200)
    assert found.all.requested_bytes == 51200
