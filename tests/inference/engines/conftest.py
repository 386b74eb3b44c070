"""Stores on small flashes, and the same K and V in arrays."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.inference.sparse.attention import sparse_attention
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore


@pytest.fixture
def make_layout():
    def make(group_tokens=8, interleaved=True, block_tokens=32, form=IndexFormat.INT4, page_bytes=4096):
        return KvLayout(group_tokens, interleaved, block_tokens, form, page_bytes)

    return make


@pytest.fixture
def make_store(tmp_path):
    """On a file."""
    stores = []

    def make(shape, layout, blocks=32, **options):
        geometry = FlashGeometry(layout.page_bytes, 32, 2, 2, blocks)
        flash = FileFlash.create(tmp_path / f"flash{len(stores)}", geometry, threads=2, direct=False)
        stores.append(KvStore(flash, shape, layout, **{"buffer_bytes": 1 << 16} | options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def shape():
    return KvShape(layers=2, kv_heads=3, dim=32)


@pytest.fixture
def filled():
    """Sequences of these lengths appended to an engine in pieces: their numbers, and K and V (h, S, d) of layer 1."""

    def fill(engine, shape, lengths, seed=1):
        rng = np.random.default_rng(seed)
        numbers, stored = [], []
        for length in lengths:
            spread = 3.0 ** rng.standard_normal((shape.kv_heads, 1, shape.dim))
            kv = [
                (rng.standard_normal((shape.kv_heads, length, shape.dim)) * spread).astype(np.float16) for _ in range(2)
            ]
            numbers.append(engine.add())
            cuts = sorted({0, length // 3, max(length - 1, 0), length})
            for start, end in pairwise(cuts):
                engine.append(numbers[-1], 1, *(x[:, start:end] for x in kv))
            stored.append(kv)
        return numbers, stored

    return fill


@pytest.fixture
def draw_q():
    """q (sequences, kv_heads, g, d) of normal numbers."""

    def draw(shape, sequences, group=3, seed=7):
        rng = np.random.default_rng(seed)
        return rng.standard_normal((sequences, shape.kv_heads, group, shape.dim)).astype(np.float16)

    return draw


@pytest.fixture
def expected():
    """Attention of each sequence by sparse_attention, its K and V in arrays."""

    def attend(q, stored, policy, layout, scaling=None, **more):
        outs = []
        for own, (k, v) in zip(q, stored, strict=True):
            tokens = torch.tensor([k.shape[1]])
            one = sparse_attention(torch.from_numpy(own).float()[:, None], torch.from_numpy(k), torch.from_numpy(v),
                                   tokens, policy, layout, scaling, **more)  # fmt: skip
            outs.append(one.out[:, 0].numpy())
        return np.stack(outs)

    return attend
