"""Attention by a device whose memory is smaller than K and V: chosen pages come from its drive ahead of the kernel.

    host: index, q ─► what the kernel will choose ─► pages, in rounds ─► window (WindowFlash) ─► kernel ─► outputs
                                                         round n + 1 is read while round n is attended to

The kernel chooses by itself, from the index pages in its window, and finds what it chooses there: the host knows it
beforehand, to the bit, from its copy of the index (nearflash.model). A choice that differed would meet a page entry of
zero, which is a fault of the head and not another result.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.device.base import Device
from nearflash.device.drivers.attend import AttendResult, Head, attend, most_contexts
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.engines.paged.index_rows import IndexCache
from nearflash.inference.engines.paged.reads import SequenceReads
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.model.attention.control.scan import top_dims
from nearflash.model.attention.head import choose_tokens
from nearflash.model.attention.memory.index import IndexBlock, QuantisedBlock
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.storage.flash.window import WindowFlash
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["WindowEngine"]

F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
_MEMORY = np.uint64(1 << 63)
"""Of a page entry in memory: words of a table below it are a page's number plus 1 until its round comes, or 0."""


class WindowEngine(DeviceEngine):
    """Attends by the policy on `device`, which reads pages of the store's WindowFlash.

    Half of the window is for the heads at work, half for those that come next. The host keeps the index in memory.
    `counters.flash_bytes` has what the drive was read for: `window`, and by the host, once for each block, `index`.
    Raises CommandError as DeviceEngine does, and for K and V of a token in pages of their own; attending raises
    UnsupportedError for a head that takes more pages than half of the window has room for.
    """

    def __init__(self, device: Device, store: KvStore, policy: AttentionPolicy, *, first_head: int = 0) -> None:
        if not isinstance(store.flash, WindowFlash):
            raise CommandError(f"store must be on a WindowFlash, not on a {type(store.flash).__name__}")
        if not store.layout.interleaved:
            raise CommandError("interleaved must be True where pages come one by one from a drive, not False")
        super().__init__(device, store, policy, first_head=first_head)
        self._flash = store.flash
        self._index = IndexCache(1 << 62)
        self._reader = ThreadPoolExecutor(1, "window-ahead")

    def check_room(self, tokens: int) -> None:
        """Raise UnsupportedError where a head of so many tokens takes more pages than half of the window holds."""
        layout, shape = self.store.layout, self.store.shape
        for layer in range(shape.layers):
            for head in range(shape.kv_heads):
                policy = self._policy_at(layer, head)
                resolved = policy.resolve(tokens, shape.dim, layout)
                groups = -(-tokens // layout.group_tokens)
                pages = groups if not resolved.score_dims else min(groups, resolved.top_k)
                index = layout.index_layout(shape.dim).pages * (tokens // layout.block_tokens)
                self._check_pages(layer, head, pages + (index if resolved.score_dims else 0))

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes by link so far: what the host wrote to the drive and read back, what came from there into the window,
        and what crossed between host and device."""
        links, read = self.device.links, self._counters.flash_bytes
        return {
            "host to disk": self.store.statistics.programmed_bytes, "disk to device": self._flash.loaded_bytes,
            "disk to host": sum(size for kind, size in read.items() if kind != "window"),
            "host to device": links.to_device, "device to host": links.from_device,
        }  # fmt: skip

    def close(self) -> None:
        """See Engine.close."""
        self._reader.shutdown()
        super().close()

    def _tables(
        self, stored: StoredHead, head: int, descriptor: AttendDescriptor, q: F16, pages: Ints, index: Ints
    ) -> tuple[Words, Words]:
        """Numbers of the pages that the kernel will read, plus 1; 0 for the others."""
        if descriptor.mode & Mode.DENSE:
            return (pages + 1).astype(np.uint64), index.astype(np.uint64)
        settings = HeadSettings.of(descriptor)
        source = _IndexInMemory(SequenceReads(self.store, stored, [head], self._read), self._index, settings)
        tokens, chosen = descriptor.tokens, choose_tokens(q, source, settings)
        groups = np.zeros((-(-tokens // settings.group_tokens), settings.group_tokens), bool)
        if chosen is not None:
            groups.reshape(-1)[:tokens] = chosen
        groups[settings.count_scanned(tokens) // settings.group_tokens :] = True  # scored by their K
        layout = self.store.pages.index_layout
        scored = np.isin(np.arange(len(index)) % layout.pages, top_dims(q, settings.score_dims) // layout.rows)
        wanted = np.asarray(groups.any(axis=1))[: len(pages)]
        return _ask(pages, wanted), _ask(index, scored)

    def _run(self, heads: Sequence[Head]) -> AttendResult:
        """Attend in rounds: pages of the next one are read while the kernel has those of this one."""
        rounds, contexts = self._rounds(heads), most_contexts(self._config, heads)
        before, done = self._flash.loaded_bytes, list[AttendResult]()
        ahead = [self._reader.submit(self._bring, part) for part in rounds[:1]]
        try:
            for number in range(len(rounds)):
                placed = ahead[number].result()
                ahead += [self._reader.submit(self._bring, part) for part in rounds[number + 1 : number + 2]]
                done.append(attend(self.device, placed, contexts=contexts))
        finally:
            wait(ahead)
            self._counters.count("window", self._flash.loaded_bytes - before)
        return AttendResult(
            tuple(head for part in done for head in part.heads), tuple(batch for part in done for batch in part.batches)
        )

    def _rounds(self, heads: Sequence[Head]) -> list[list[Head]]:
        """Heads in their order, as many at once as half of the window has pages for."""
        rounds, taken = [list[Head]()], set[int]()
        for head in heads:
            tag, own = head.descriptor.page_tag, set(np.concatenate(_numbers(head)).tolist())
            self._check_pages(tag.layer, tag.head, len(own))
            if len(taken | own) > self._flash.slots // 2:
                rounds.append([])
                taken.clear()
            rounds[-1].append(head)
            taken |= own
        return rounds if heads else []

    def _check_pages(self, layer: int, head: int, pages: int) -> None:
        if pages > self._flash.slots // 2:
            raise UnsupportedError(
                f"layer {layer}, head {head} on {self.name} must take at most {self._flash.slots // 2} pages, half of "
                f"the window, not {pages}: the kernel carries no sums from one round of pages to the next; choose "
                "fewer (--attention sparf-page --top-k), or give a larger window (--cache-size)"
            )

    def _bring(self, heads: Sequence[Head]) -> list[Head]:
        """The heads with their pages in the window, and with the entries of these."""
        pages = np.unique(np.concatenate([numbers for head in heads for numbers in _numbers(head)]))
        entries = self.store.table(pages - 1)

        def fill(table: Words) -> Words:
            if not len(pages):
                return table
            places = np.minimum(np.searchsorted(pages, table.astype(np.int64)), len(pages) - 1)
            return np.where((table == 0) | (table >= _MEMORY), table, entries[places])

        return [replace(head, token_table=fill(head.token_table), index_table=fill(head.index_table)) for head in heads]

    def _share(self, sequence: int, other: int) -> None:
        self._index.share(sequence, other)

    def _truncate(self, sequence: int, length: int) -> None:
        self._index.truncate(sequence, length // self.store.layout.block_tokens)
        super()._truncate(sequence, length)

    def _forget(self, sequence: int) -> None:
        self._index.drop(sequence)
        super()._forget(sequence)


def _ask(pages: Ints, wanted: NDArray[np.bool_]) -> Words:
    return np.where(wanted, pages + 1, 0).astype(np.uint64)


def _numbers(head: Head) -> list[Ints]:
    """Numbers plus 1 of the pages that a head's tables ask for."""
    tables = head.token_table, head.index_table
    return [table[(table > 0) & (table < _MEMORY)].astype(np.int64) for table in tables]


class _IndexInMemory:
    """Index and last keys of one head in the host's memory: what its scan reads (HeadSource of nearflash.model)."""

    faults = Fault(0)

    def __init__(self, reads: SequenceReads, memory: IndexCache, settings: HeadSettings) -> None:
        self._reads, self._memory, self._settings = reads, memory, settings
        self.tokens = reads.tokens

    def blocks(self, dims: Ints) -> list[IndexBlock]:
        """The index over `dims` (r,) of whole blocks."""
        if not self._settings.count_scanned(self.tokens):
            return []
        rows, places = self._reads.index(dims[None], self._memory)
        codes, factors = rows.codes[0][:, places[0]], rows.factors[0][:, places[0]]
        return [self._block(*block) for block in zip(codes, factors, strict=True)]

    def suffix(self, dims: Ints) -> F16:
        """K (t, r) of the tokens after the whole blocks."""
        return self._reads.suffix()[0][:, dims]

    def read_chosen(self, mask: NDArray[np.bool_]) -> tuple[F16, F16]:
        """Nothing: the kernel reads what is chosen."""
        raise NotImplementedError("chosen tokens are the kernel's")

    def _block(self, codes: NDArray[np.uint8], factors: F16) -> IndexBlock:
        """A block of rows (r, bytes), with scale and zero (r, 2)."""
        form = self._settings.index_format
        if form is IndexFormat.FP16:
            return np.ascontiguousarray(codes).view(np.float16).T
        if form is IndexFormat.INT4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        return QuantisedBlock(codes.T, factors[:, 0], factors[:, 1], form)
