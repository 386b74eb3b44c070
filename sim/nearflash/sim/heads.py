"""Heads on the simulated attend kernel: random ones of every mode, and their pages put where the kernel finds them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import Owner
from nearflash.abi.attend.descriptor import COMPLETION_BYTES, Mode
from nearflash.abi.attend.numbers import LOG2E
from nearflash.abi.attend.pages import IndexFormat, IndexLayout, PageEntry, TokenLayout
from nearflash.abi.config import AttendConfig
from nearflash.device.attend import Head, PlacedBatch
from nearflash.device.base import Buffer, Device
from nearflash.model.attend.image import PageImage, head_image
from nearflash.model.attend.placement import MemoryStore, NandStore, Store
from nearflash.model.attend.settings import Addresses, Settings
from nearflash.sim.attention import Case
from nearflash.sim.device import VerilatorDevice

__all__ = ["MODES", "completion_records", "fits", "page_settings", "placed", "random_head"]

#: Modes by name; sparq ranks as sparf does, and reads no pages of its own.
MODES = {
    "dense": Mode.DENSE | Mode.REFERENCE,
    "sparq": Mode(0),
    "sparf": Mode.PROBABILITY,
    "sparf-page": Mode.PAGE | Mode.PROBABILITY,
}


def random_head(rng: np.random.Generator, mode: str, dim: int, group: int, tokens: int, owner: Owner) -> Case:
    """A head of `mode` with everything that the mode leaves open drawn: layouts, formats, budgets, windows."""
    interleaved = bool(rng.integers(2))
    most = TokenLayout.capacity(4096, dim, interleaved)
    group_tokens = int(rng.choice([n for n in (4, 8, 12, 16, 24, 32) if n <= most]))
    blocks = [t for t in (48, 96, 192, 256, 960, 1024) if t % group_tokens == 0]
    page = mode == "sparf-page"
    entries = -(-tokens // group_tokens) if page else tokens
    settings = Settings(
        MODES[mode] & ~Mode.PROBABILITY if mode == "sparf" and group == 1 else MODES[mode],
        dim,
        LOG2E / math.sqrt(dim),
        channels=0 if mode == "dense" else int(rng.integers(1, dim + 1)),
        budget=0 if mode == "dense" else int(rng.integers(1, entries + 1)),
        local=0 if mode == "dense" else int(rng.integers(0, min(tokens, 64) + 1)),
        mass=int(rng.integers(1, 1 << 16)) if page and rng.integers(2) else 0,
        group_tokens=group_tokens,
        interleaved=interleaved,
        block_tokens=int(rng.choice(blocks)),
        index_format=IndexFormat(int(rng.integers(3))),
        reference=(4,) * group if mode == "dense" else (),
    )
    spread = rng.uniform(0.5, 2.0, dim)  # channels differ, as a model's do
    q, k, v = (rng.standard_normal((n, dim)) for n in (group, tokens, tokens))
    return Case.of(settings, owner, q * spread, k * spread, v)


def page_settings(mode: str, dim: int, tokens: int, page_bytes: int = 4096) -> Settings:
    """What figures are given for: full interleaved pages, an int4 index, r = d/4, an eighth of the pages."""
    group_tokens = page_bytes // (4 * dim)
    return Settings(
        MODES[mode],
        dim,
        LOG2E / math.sqrt(dim),
        channels=dim // 4,
        budget=tokens // group_tokens // 8,
        group_tokens=group_tokens,
        interleaved=True,
        block_tokens=1024,
        index_format=IndexFormat.INT4,
        page_bytes=page_bytes,
    )


def fits(config: AttendConfig, settings: Settings, tokens: int, group: int, contexts: int) -> bool:
    """Whether such a head can be one of `contexts` in flight."""
    passes = -(-group // config.heads_per_beat)
    entries = settings.entries(tokens)
    return (
        settings.dim // 4 * passes <= config.query_rows // contexts
        and (bool(settings.mode & Mode.DENSE) or passes <= config.score_blocks)
        and (bool(settings.mode & Mode.DENSE) or entries * group <= config.score_entries // contexts)
        and entries <= config.selector_keys
    )


@contextmanager
def placed(device: Device, heads: Iterable[Case], *, memory: bool = False, turn: int = 0) -> Iterator[list[Head]]:
    """Put the heads' pages on the device's NAND (or in its memory), the last group in memory where it is not full.

    `turn` puts everything on another channel: pages then arrive in another order. Memory is given back at the end; the
    pages on NAND stay until others take their rows.
    """
    config = device.identity.config
    assert isinstance(config, AttendConfig)
    nand = NandStore(config.channels, config.units) if config.units and not memory else None
    flash: list[PageImage] = []
    found: list[Head] = []
    buffers: list[Buffer] = []
    try:
        for head in heads:
            buffers.append(buffer := device.allocate(_image_bytes(head)))
            rest = MemoryStore(buffer.address, config.channels)
            store: Store = _Turned(nand or rest, turn)
            whole = len(head.k) // head.settings.group_tokens * head.settings.group_tokens
            image = head_image(
                head.k,
                head.v,
                head.settings,
                head.owner,
                store,
                memory=rest,
                flushed=whole,
            )
            flash += _to_memory(image.pages, buffer.host, buffer.address)
            buffer.sync_to_device()
            descriptor = head.settings.descriptor(head.owner, len(head.k), len(head.q), Addresses())
            found.append(Head(descriptor, head.q, head.v_mean, image.token_table, image.index_table))
        if flash:
            assert isinstance(device, VerilatorDevice)
            _to_nand(device, flash)
        yield found
    finally:
        for buffer in buffers:
            device.free(buffer)


def completion_records(device: VerilatorDevice, batch: PlacedBatch) -> NDArray[np.uint8]:
    """The batch's completions in the simulated memory, (heads, COMPLETION_BYTES); one is zero until its head ends."""
    count, kernel = len(batch.batch.descriptors), device.kernel
    start = batch.batch.completions_address - kernel.base_address
    return kernel.memory[start:][: count * COMPLETION_BYTES].reshape(count, -1)


def _to_nand(device: VerilatorDevice, pages: Iterable[PageImage]) -> None:
    """Load pages, all those of a unit at once."""
    by_unit = defaultdict(list)
    for page in pages:
        by_unit[page.entry.channel, page.entry.unit].append(page)
    for (channel, unit), own in by_unit.items():
        rows = np.array([page.entry.row for page in own], np.uint32)
        data = np.stack([np.frombuffer(page.data, np.uint8) for page in own])
        device.kernel.channels[channel].load(unit, rows, data)


class _Turned:
    """A store whose channels are turned by `turn`."""

    def __init__(self, store: Store, turn: int) -> None:
        self._store, self._turn, self.channels = store, turn, store.channels

    def take(self, channel: int, pages: int, page_bytes: int) -> PageEntry:
        """A place on another channel."""
        return self._store.take(channel + self._turn, pages, page_bytes)


def _to_memory(pages: Sequence[PageImage], host: NDArray[np.uint8], base: int) -> list[PageImage]:
    """Copy the pages that lie in memory; the others."""
    for page in pages:
        if page.entry.address is not None:
            start = page.entry.address - base
            host[start : start + len(page.data)] = np.frombuffer(page.data, np.uint8)
    return [page for page in pages if page.entry.address is None]


def _image_bytes(head: Case) -> int:
    settings, tokens = head.settings, len(head.k)
    groups = -(-tokens // settings.group_tokens) * settings.token_layout.pages
    blocks = 0 if settings.mode & Mode.DENSE else tokens // settings.block_tokens
    index = IndexLayout(settings.page_bytes, settings.dim, settings.block_tokens, settings.index_format).pages
    return (groups + blocks * index) * settings.page_bytes // 512 * 528
