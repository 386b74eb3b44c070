"""Random heads of every mode on a device of the attend kernel, against the model.

Their pages lie in the device's memory, as no device writes flash yet.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import HeadCompletion
from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Buffer, Device
from nearflash.device.drivers.attend import Head, attend, most_contexts
from nearflash.device.selftest.comparison import Comparison
from nearflash.model.attention.memory.image import PageImage, head_image, image_bytes
from nearflash.model.attention.memory.placement import MemoryStore, PageStore
from nearflash.model.attention.memory.settings import Addresses
from nearflash.model.attention.random_vectors import MODES, random_mode_vector
from nearflash.model.attention.vectors import TestVector

__all__ = ["compare_heads", "place_heads"]

_SHAPES = ((64, 1), (80, 2), (128, 4))
"""Head dimension and query heads."""


@contextmanager
def place_heads(
    device: Device, vectors: Iterable[TestVector], flash: PageStore | None = None, *, turn: int = 0
) -> Iterator[tuple[list[Head], list[PageImage]]]:
    """Put the pages of heads in the device's memory; with `flash` only the last group, where it is not full.

    Gives the heads and the pages that are to be on flash. `turn` puts everything on another channel: pages then arrive
    in another order. Memory is given back at the end.
    """
    config = device.identity.config
    assert isinstance(config, AttendConfig)
    heads: list[Head] = []
    pages: list[PageImage] = []
    buffers: list[Buffer] = []
    try:
        for vector in vectors:
            settings, size = vector.settings, len(vector.k)
            buffers.append(buffer := device.allocate(image_bytes(settings, size)))
            memory = MemoryStore(buffer.address, config.channels)
            whole = size // settings.group_tokens * settings.group_tokens
            image = head_image(
                vector.k, vector.v, settings, vector.page_tag, flash or memory, memory=memory, flushed=whole, turn=turn
            )
            image.copy_to_memory(buffer.host, buffer.address)
            buffer.sync_to_device()
            pages += image.flash_pages
            descriptor = settings.descriptor(vector.page_tag, size, len(vector.q), Addresses())
            heads.append(Head(descriptor, vector.q, vector.v_mean, image.token_table, image.index_table))
        yield heads, pages
    finally:
        for buffer in buffers:
            device.free(buffer)


def compare_heads(device: Device, *, tokens: int, seed: int) -> Iterator[Comparison]:
    """Heads of every mode in one batch; S·g of each is about `tokens`.

    Raises CommandError for less than one token, or more than the build has room for; what the device raises.
    """
    if tokens < 1:
        raise CommandError(f"tokens must be at least 1, not {tokens!r}")
    rng, config = np.random.default_rng(seed), device.identity.config
    assert isinstance(config, AttendConfig)
    drawn = [(mode, dim, group, -(-tokens // group)) for mode in MODES for dim, group in _SHAPES]
    vectors = [
        random_mode_vector(rng, *drawn_head, PageTag(index, index % 7, index)) for index, drawn_head in enumerate(drawn)
    ]
    with place_heads(device, vectors) as (heads, _):
        done = attend(device, heads, contexts=most_contexts(config, heads))
    for (mode, dim, group, size), vector, head in zip(drawn, vectors, done.heads, strict=True):
        result = vector.result(repeated=True)
        expected = _words(vector, vector.completion(result), result.out)
        wrong = _words(vector, head.completion, head.out) != expected
        yield Comparison(f"{mode:<12}S {size:<6}d {dim:<4}g {group}", expected.size, int(wrong.sum()))


def _words(vector: TestVector, completion: HeadCompletion, out: NDArray[np.float16] | None) -> NDArray[np.uint16]:
    """Completion and output; NaN where there is none."""
    values = np.full_like(vector.q, np.nan) if out is None else out
    return np.frombuffer(completion.pack() + values.tobytes(), np.uint16)
