"""Wear of the flash by a run of about 10,000 tokens: bytes programmed for each byte appended, erases of its blocks.

    long         one sequence: a prompt of 9,000 tokens, 1,000 more one by one
    turnover     12 sequences of 500 to 1,150 tokens, four at a time: prompts of 200 tokens, the others one by one in
                 turns; freed when complete, on a flash with room for 4,400 tokens
    crowded      the same on a flash with room for 3,400 tokens

No attention: reads wear no flash, and blocks are moved for being read often only after 100,000 reads.
"""

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.pages import IndexFormat
from nearflash.bench.options import Option, check_choices
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore

__all__ = ["run"]

SHAPE = KvShape(layers=30, kv_heads=3, dim=64)
LAYOUT = KvLayout(64, True, 1024, IndexFormat.INT4, 16384)
_MIXED = tuple(500 + 130 * (5 * i % 6) for i in range(12))
CASES = {
    # Tokens of each sequence, of its prompt; sequences at a time; room for how many tokens.
    "long": ((10_000,), 9_000, 1, 15_000),
    "turnover": (_MIXED, 200, 4, 4_400),
    "crowded": (_MIXED, 200, 4, 3_400),
}
_PAGES_PER_BLOCK = 256
_STAGE_BYTES = 4 << 20
_WITH_INDEX = 1.13
"""Bytes of pages for each byte of K and V."""


def run(
    parts: Annotated[
        Collection[str] | None, Option("Measure these cases (default: all).", many=True, choices=CASES)
    ] = None,
) -> Iterator[dict[str, Any]]:
    """A row for each case (the `parts`). Raises CommandError for another one."""
    for case in check_choices("parts", parts, CASES):
        lengths, prompt, at_a_time, room_tokens = CASES[case]
        with tempfile.TemporaryDirectory() as folder, _store(Path(folder) / "kv", room_tokens) as store:
            _fill(store, lengths, prompt, at_a_time)
            yield {"case": case} | _wear(store)


def _store(path: Path, room_tokens: int) -> KvStore:
    kv_bytes = room_tokens * SHAPE.token_bytes * _WITH_INDEX
    blocks = -(-int(kv_bytes) // (LAYOUT.page_bytes * _PAGES_PER_BLOCK))
    flash = FileFlash.create(path, FlashGeometry(LAYOUT.page_bytes, _PAGES_PER_BLOCK, 1, 1, blocks))
    return KvStore(flash, SHAPE, LAYOUT, buffer_bytes=_STAGE_BYTES)


def _fill(store: KvStore, lengths: tuple[int, ...], prompt: int, at_a_time: int) -> None:
    """Sequences interleaved, a token each; a new one begins where one is complete. The last one stays."""
    waiting = [_one(store, seed, tokens, prompt, free=seed < len(lengths) - 1) for seed, tokens in enumerate(lengths)]
    running = [waiting.pop(0) for _ in range(at_a_time)]
    while running:
        first = running.pop(0)
        if next(first, None) is not None:
            running.append(first)
        elif waiting:
            running.append(waiting.pop(0))
    store.flush()


def _one(store: KvStore, seed: int, tokens: int, prompt: int, *, free: bool) -> Iterator[int]:
    """A sequence, its number after each token."""
    kv = np.random.default_rng(seed).standard_normal((2, SHAPE.kv_heads, tokens, SHAPE.dim), np.float32)
    k, v = kv.astype(np.float16)
    number = store.add()
    _append(store, number, k[:, :prompt], v[:, :prompt])
    for token in range(prompt, tokens):
        yield number
        _append(store, number, k[:, token : token + 1], v[:, token : token + 1])
    if free:
        store.free(number)


def _append(store: KvStore, number: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
    for layer in range(SHAPE.layers):
        store.append(number, layer, k, v)


def _wear(store: KvStore) -> dict[str, Any]:
    statistics = store.statistics
    return {
        "tokens": statistics.host_bytes // SHAPE.token_bytes,
        "host_bytes": statistics.host_bytes,
        "programmed_bytes": statistics.programmed_bytes,
        "programmed_pages": {str(cause): pages for cause, pages in statistics.programmed.items()},
        "write_amplification": statistics.write_amplification,
        "of": "data of pages programmed over K and V appended",
        "blocks": len(statistics.erases),
        "block_bytes": LAYOUT.page_bytes * _PAGES_PER_BLOCK,
        "erases": int(statistics.erases.sum()),
        "erases_of_a_block_most": int(statistics.erases.max()),
        "erases_of_a_block_least": int(statistics.erases.min()),
        "model": "shape of SmolLM2-135M",
        "kv": "random numbers",
    }
