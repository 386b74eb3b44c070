"""Heads on the simulated attend kernel: their pages put where it finds them, on its NAND too."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import MESSAGE_BYTES, RAW_BYTES, SEALED_BYTES
from nearflash.abi.attention.descriptor import COMPLETION_BYTES
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Device
from nearflash.device.drivers.attend import Head, PlacedBatch
from nearflash.device.drivers.pages import NandPage, erase, program
from nearflash.device.selftest.attend import place_heads as placed_in_memory
from nearflash.model.attention.memory.image import PageImage
from nearflash.model.attention.memory.placement import NandStore
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.random_vectors import MODES
from nearflash.model.attention.vectors import TestVector
from nearflash.model.nand.scramble import scrambling
from nearflash.sim.verilator.device import VerilatorDevice

__all__ = ["completion_records", "page_settings", "place_heads"]


def page_settings(mode: str, dim: int, tokens: int, page_bytes: int = 4096) -> HeadSettings:
    """Make settings of published figures: full interleaved pages, an int4 index, r = d/4, an eighth of the pages."""
    group_tokens = page_bytes // (4 * dim)
    return HeadSettings(
        MODES[mode],
        dim,
        LOG2E / math.sqrt(dim),
        score_dims=dim // 4,
        top_k=tokens // group_tokens // 8,
        group_tokens=group_tokens,
        interleaved=True,
        block_tokens=1024,
        index_format=IndexFormat.INT4,
        page_bytes=page_bytes,
    )


@contextmanager
def place_heads(
    device: Device, vectors: Iterable[TestVector], *, memory: bool = False, turn: int = 0, written: bool = False
) -> Iterator[list[Head]]:
    """Heads whose pages are on the device's NAND, where it has one, or in its `memory`, given back at the end.

    `turn` puts everything on another channel. Pages on NAND stay until others take their rows. With `written` the
    kernel itself puts them there, in erased blocks, which takes time; else they are there at once.
    """
    config = device.identity.config
    assert isinstance(config, AttendConfig)
    nand = NandStore(config.channels, config.luns) if config.luns and not memory else None
    with placed_in_memory(device, vectors, nand, turn=turn) as (heads, pages):
        if pages:
            assert isinstance(device, VerilatorDevice)
            (_write if written else _to_nand)(device, pages)
        yield heads


def completion_records(device: VerilatorDevice, batch: PlacedBatch) -> NDArray[np.uint8]:
    """The batch's completions in the simulated memory, (heads, COMPLETION_BYTES); one is zero until its head ends."""
    count, kernel = len(batch.batch.descriptors), device.kernel
    start = batch.batch.completions_address - kernel.base_address
    return kernel.memory[start:][: count * COMPLETION_BYTES].reshape(count, -1)


def _write(device: VerilatorDevice, pages: Iterable[PageImage]) -> None:
    """Have the kernel erase the blocks and program the pages."""
    size = device.kernel.channels[0].model.part.pages_per_block
    own = sorted(pages, key=lambda page: page.entry.row)
    erase(device, sorted({replace(page.entry, row=page.entry.row // size * size) for page in own}, key=PageEntry.pack))
    names = [NandPage(page.entry, page.page_tag, page.index, page.kind, page.second) for page in own]
    program(device, names, [_seal(page) for page in own])


def _seal(page: PageImage) -> NDArray[np.uint8]:
    """The page's codewords as in memory, (codewords, 528)."""
    codewords = np.frombuffer(page.data, np.uint8).reshape(-1, RAW_BYTES)
    plain = codewords ^ scrambling(page.entry.row, page.entry.lun, np.arange(len(codewords)))
    sealed = np.zeros((len(codewords), SEALED_BYTES), np.uint8)
    sealed[:, :MESSAGE_BYTES] = plain[:, :MESSAGE_BYTES]
    return sealed


def _to_nand(device: VerilatorDevice, pages: Iterable[PageImage]) -> None:
    """Load pages, all those of a lun at once."""
    by_unit = defaultdict(list)
    for page in pages:
        by_unit[page.entry.channel, page.entry.lun].append(page)
    for (channel, lun), own in by_unit.items():
        rows = np.array([page.entry.row for page in own], np.uint32)
        data = np.stack([np.frombuffer(page.data, np.uint8) for page in own])
        device.kernel.channels[channel].load(lun, rows, data)
