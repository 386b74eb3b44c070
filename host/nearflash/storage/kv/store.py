"""K and V of sequences on a flash: appended token by token or many at once, found by sequence, layer and head."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.errors import CommandError, FormatError, PageError, ReadOnlyError, ShapeError, StorageFullError
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.file import KEPT
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys
from nearflash.storage.kv.journal import SequenceJournal
from nearflash.storage.kv.layout import KvLayout, KvShape
from nearflash.storage.kv.pages import PageMaker
from nearflash.storage.kv.pool import PagePool
from nearflash.storage.kv.recovery import FoundPages
from nearflash.storage.kv.sequence import PartialGroup
from nearflash.storage.kv.sequences import Sequences
from nearflash.storage.kv.statistics import Cause, KvStatistics
from nearflash.support.closing import Closing

__all__ = ["KvStore", "StoredHead"]

F16 = NDArray[np.float16]
DEFAULT_BUFFER_BYTES = 16 << 20
DEFAULT_READ_LIMIT = 100_000
DEFAULT_SUFFIX_BYTES = 256 << 20
_QUEUE_BLOCKS_MIN = 3
"""One to take KV page groups, one to take index pages, one kept free."""
_NAMED = 4
"""Lost pages that a message names."""


@dataclass(frozen=True)
class StoredHead:
    """Places of K and V of one head, or of all heads of a layer: every array then begins with an axis of heads.

    Page numbers and views hold until the store's next `append` that fills a group, `free` or `flush`.
    """

    sequence: int
    """Its number in the store."""
    page_tag: PageTag
    """Of the first head, for pages to come."""
    tokens: int
    """S."""
    token_pages: PageNumbers
    """Of the full KV page groups; of separate ones K's page, V's being the next."""
    index_pages: PageNumbers
    token_tags: NDArray[np.int64]
    """Of each full group: the sequence in its page tag, another one's after a fork, or another after a crop."""
    index_tags: NDArray[np.int64]
    """Of each index block."""
    suffix_k: F16
    """(u, d): the last tokens, which are in memory."""
    suffix_v: F16
    v_mean: NDArray[np.float32]
    """(d,): of all values."""

    @property
    def flash_tokens(self) -> int:
        """Tokens that are not in memory, a multiple of n."""
        return self.tokens - int(self.suffix_k.shape[-2])


class KvStore(Closing):
    """Sequences on a flash that is used for nothing else. Calls come from one thread at a time.

    Pages are staged in `buffer_bytes` and programmed when those are full; in the `background` by a thread, whose first
    error every later call raises. A block read more than `read_limit` times since its erase is moved by the next
    `flush`, or `append` that fills a KV page group.

    A sequence's unindexed suffix (K and V after its last whole index block) stays in memory, beside being programmed,
    where `suffix_bytes` have room when the sequence is added: T · shape.token_bytes for each.

    With a `journal` sequences outlast the store: those in it are there again by the same numbers, with their full KV
    page groups, and with the tokens after them as the last `flush` or `close` found them. Pages are programmed as soon
    as they are staged, what was noted before them durable by then. The journal is then the store's own.

    Raises CommandError where layout, shape and flash do not fit together; PageError where pages of the journal's
    sequences cannot be read.
    """

    def __init__(
        self, flash: Flash, shape: KvShape, layout: KvLayout, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        background: bool = False, read_limit: int = DEFAULT_READ_LIMIT, suffix_bytes: int = DEFAULT_SUFFIX_BYTES,
        journal: SequenceJournal | None = None,
    ) -> None:  # fmt: skip
        geometry = flash.geometry
        if geometry.page_bytes != layout.page_bytes:
            raise CommandError(f"page_bytes must be the flash's {geometry.page_bytes}, not {layout.page_bytes}")
        if geometry.blocks // geometry.lun_queues < _QUEUE_BLOCKS_MIN:
            raise StorageFullError(
                f"blocks must be at least {_QUEUE_BLOCKS_MIN} on each lun of each channel, not {geometry.blocks}"
            )
        if geometry.pages_per_block % layout.group_pages:
            raise CommandError(f"pages_per_block must be even for separate groups, not {geometry.pages_per_block}")
        self.flash, self.shape, self.layout = flash, shape, layout
        self.pages = PageMaker(shape, layout)
        self._pool = PagePool(
            flash, lambda *moved: self._sequences.note_moves(*moved), buffer_bytes=buffer_bytes, background=background,
            read_limit=read_limit, **({} if journal is None else {"ahead": journal.sync}),
        )  # fmt: skip
        self._journal = journal
        self._sequences = Sequences(
            self.pages, self._pool.space, self.read, suffix_bytes=suffix_bytes, durable=flash.durable, journal=journal
        )
        self._host_bytes = 0
        self._open = True
        self._has_torn = False
        if journal is None:
            flash.label({"shape": asdict(shape), "layout": asdict(layout)})
        else:
            pages = FoundPages(flash, shape, layout, verify=journal.sums is None)
            self._has_torn = pages.has_torn
            self._sequences.restore(pages)
            self._begin(journal)
            self._complete_index()

    # Sequences

    @property
    def lengths(self) -> Mapping[int, int]:
        """Tokens that every layer has, by sequence."""
        return {number: int(self._sequences[number].lengths.min()) for number in self._sequences}

    def add(self) -> int:
        """A new sequence's number."""
        return self._sequences.add()

    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one: what is on flash is shared, what is in memory copied.

        Raises CommandError for one that is not there, or has more tokens in some layers than in others.
        """
        return self._sequences.fork(sequence)

    def crop(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens in every layer; the group that is cut is in memory again.

        Raises CommandError for more than every layer has, PageError for pages that cannot be read; nothing is changed.
        """
        self._sequences.crop(sequence, length)

    @property
    def suffix_bytes(self) -> int:
        """Memory for unindexed suffixes, and for the last groups of the other sequences."""
        return self._sequences.suffix_bytes

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are erased when their blocks are needed. Raises CommandError."""
        self._sequences.free(sequence)

    def note(self, sequence: int, info: Mapping[str, Any]) -> None:
        """Keep what the user says of a sequence (JSON values) in the journal, in place of what was said before.

        Raises CommandError for a sequence that is not there, or without a journal.
        """
        self._sequences[sequence]
        if self._journal is None:
            raise CommandError("notes must be of a store with a journal")
        self._journal.note(sequence, info)

    @property
    def is_kept(self) -> bool:
        """Sequences outlast the store: it has a journal."""
        return self._journal is not None

    @property
    def notes(self) -> Mapping[int, Mapping[str, Any]]:
        """The notes on each sequence; none without a journal."""
        return {} if self._journal is None else {number: entry.info for number, entry in self._journal.entries.items()}

    # Writing

    def append(self, sequence: int, layer: int, k: F16, v: F16) -> None:
        """Store k and v (kv_heads, t, d) of t tokens after what is there.

        Raises CommandError, ShapeError and FormatError; StorageFullError before anything changed; what a program or
        an erase raised before, and PageError where pages that must be moved or indexed cannot be read.
        """
        state = self._sequences[sequence]
        self._check(layer, k, v)
        if not self.fills_group(sequence, layer, k.shape[1]):
            self._pool.stage.check()
            state.push(layer, k, v)
            state.v_sum[layer] += v[:, 0] if k.shape[1] == 1 else v.sum(axis=1, dtype=np.float64)
            self._host_bytes += k.nbytes + v.nbytes
            return
        self._pool.reclaim()
        start, size, block = int(state.lengths[layer]), self.layout.group_tokens, self.layout.block_tokens
        end = start + k.shape[1]
        groups, blocks = range(start // size, end // size), range(start // block, end // block)
        kv = state.with_suffix(layer, np.stack([k, v]))
        self._store(sequence, layer, groups, blocks, kv)
        if self._journal is not None:
            self._pool.stage.hand_over()
        state.extend(layer, kv)
        state.v_sum[layer] += v.sum(axis=1, dtype=np.float64)
        self._host_bytes += k.nbytes + v.nbytes

    def fills_group(self, sequence: int, layer: int, tokens: int) -> bool:
        """Whether `append` of so many tokens fills a KV page group. If not, all pages stay as and where they are, and
        may be read meanwhile. Raises CommandError.
        """
        self._check_layer(layer)
        filled = int(self._sequences[sequence].lengths[layer]) % self.layout.group_tokens
        return filled + tokens >= self.layout.group_tokens

    def flush(self) -> None:
        """Program what is staged, and return when it is durable.

        Groups that are not full are in memory alone; with a journal they are programmed, too, in pages that serve until
        the next flush. Raises StorageFullError where there is no room for that; all else is durable then.
        """
        if self._journal is not None:
            self._journal.note_again()
            self._journal.sync()
        self._pool.reclaim()
        self._pool.flush()
        if self._journal is not None:
            self._keep_partial_groups()

    def close(self) -> None:
        """Program what is staged and release the flash; it may be called twice.

        Raises what programming raised, unless an earlier call did; StorageFullError as `flush` does: it is closed then.
        """
        if not self._open:
            return
        self._open = False
        if self._journal is None:
            self._pool.close()
            return
        sums = None
        try:
            self._journal.note_again()
            self._pool.flush()
            try:
                self._keep_partial_groups()
            finally:
                self._pool.flush()  # pages may have been moved to make room for them
                if not self._has_torn:  # which the next opening must tell from valid ones again
                    sums = self._sequences.group_sums()
        finally:
            try:
                self._journal.close(sums)
            finally:
                self._pool.close()

    # Reading

    def head(self, sequence: int, layer: int, head: int) -> StoredHead:
        """Places of a head's K and V. Raises CommandError."""
        if not 0 <= head < self.shape.kv_heads:
            raise CommandError(f"head must be 0 to {self.shape.kv_heads - 1}, not {head!r}")
        return self._find(sequence, layer, head, head)

    def layer(self, sequence: int, layer: int) -> StoredHead:
        """Places of K and V of all heads of a layer. Raises CommandError."""
        return self._find(sequence, layer, 0, slice(None))

    def memory(self, sequence: int, layer: int) -> tuple[F16, int] | None:
        """All tokens of a layer, where they are in memory: (2, layers, heads, T, d), and how many they are; else None.

        Raises CommandError.
        """
        return self._sequences[sequence].memory(layer)

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """Pages as `head` gave them, from flash or from the stage. Raises PageError that names the tokens lost."""
        try:
            return self._pool.read(pages, expected)
        except PageError as error:
            lost = "; ".join(self.layout.describe(key, self.shape.dim) for _, key in error.pages[:_NAMED])
            raise PageError(f"{error}: {lost}", error.pages) from error

    def count_reads(self, pages: PageNumbers) -> None:
        """Count pages that a device read: blocks read often are moved."""
        self._pool.count_reads(pages)

    def table(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """Words of a device's page table; what is staged is programmed before. Raises CommandError.

        Of a flash that is read only those pages have words that are on it; ReadOnlyError for others.
        """
        try:
            self._pool.stage.flush()  # all of it: a program may move pages whose words were asked for before
        except ReadOnlyError:
            groups = pages[:, None] + np.arange(self.layout.group_pages)  # V's page lies behind K's
            if (self._pool.stage.find(np.minimum(groups, self.flash.geometry.pages - 1)) >= 0).any():
                raise
        return self.flash.entries(pages)

    @property
    def statistics(self) -> KvStatistics:
        """Counts of the work so far."""
        pool, space = self._pool, self._pool.space
        return KvStatistics(
            self._host_bytes, pool.reads, dict(pool.programmed), self.layout.page_bytes, space.live_pages,
            space.erases.copy(), space.reads.copy(),
        )  # fmt: skip

    # Parts

    def _begin(self, journal: SequenceJournal) -> None:
        """Give journal and flash the store's new name: the journal first, which takes the old one until it is begun."""
        self.flash.sync()  # the label that the journal names as the one before
        journal.begin()
        self.flash.label({"shape": asdict(self.shape), "layout": asdict(self.layout), KEPT: journal.store})
        self.flash.sync()
        journal.confirm()

    def _find(self, sequence: int, layer: int, first: int, heads: int | slice) -> StoredHead:
        state = self._sequences[sequence]
        self._check_layer(layer)
        tokens = int(state.lengths[layer])
        suffix_k, suffix_v = state.suffix(layer)
        groups, pages = state.tokens[layer].pages[heads], state.index[layer].pages[heads]
        blocks = pages.shape[-1] // self.pages.index_layout.pages
        return StoredHead(
            sequence, PageTag(state.token_tags.last, layer, first), tokens, groups, pages,
            state.token_tags.of(np.arange(groups.shape[-1])), state.index_tags.of(np.arange(blocks)),
            suffix_k[heads], suffix_v[heads],
            (state.v_sum[layer, heads] / max(tokens, 1)).astype(np.float32),
        )  # fmt: skip

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.layers:
            raise CommandError(f"layer must be 0 to {self.shape.layers - 1}, not {layer!r}")

    def _check(self, layer: int, k: F16, v: F16) -> None:
        self._check_layer(layer)
        for name, values in (("k", k), ("v", v)):
            if values.ndim != 3 or (values.shape[0], values.shape[2]) != (self.shape.kv_heads, self.shape.dim):
                raise ShapeError(f"{name} must be ({self.shape.kv_heads}, t, {self.shape.dim}), not {values.shape}")
            if values.dtype != np.float16:
                raise FormatError(f"{name} must be float16, not {values.dtype}")
        if k.shape != v.shape:
            raise ShapeError(f"v must have the shape of k, {k.shape}, not {v.shape}")

    def _store(self, sequence: int, layer: int, groups: range, blocks: range, kv: F16) -> None:
        """Store KV page groups and index blocks; kv (2, heads, t, d) begin with the tokens in memory."""
        state, size = self._sequences[sequence], self.layout.group_tokens
        keys = (
            self.pages.token_keys(state.token_tags.last, layer, groups),
            self.pages.index_keys(state.index_tags.last, layer, blocks),
        )
        queues = self._token_queues(keys[0]), self._index_queues(keys[1])
        self._pool.make_room(
            np.stack([np.bincount(queue, minlength=self.flash.geometry.lun_queues) for queue in queues])
        )
        first = int(state.lengths[layer]) // state.suffix_tokens * state.suffix_tokens
        indexed = self._read_blocks(sequence, layer, kv[0], first, blocks) if blocks else kv[0]
        batch = self.pages.token_pages(keys[0], *kv[:, :, groups.start * size - first : groups.stop * size - first])
        pages = self._pool.put(PageKind.TOKEN, batch, queues[0], Cause.TOKEN)
        if blocks:
            index = self._pool.put(PageKind.INDEX, self.pages.index_pages(keys[1], indexed), queues[1], Cause.INDEX)
            state.index[layer].extend(index.reshape(self.shape.kv_heads, keys[1][0].size))
        state.tokens[layer].extend(pages.reshape(keys[0].shape)[..., 0])

    def _read_blocks(self, sequence: int, layer: int, k: F16, start: int, blocks: range) -> F16:
        """K of whole blocks, (heads, tokens, d), of which k holds the tokens from `start` on."""
        first, end = blocks.start * self.layout.block_tokens, blocks.stop * self.layout.block_tokens
        if first >= start:
            return k[:, first - start : end - start]
        groups = range(first // self.layout.group_tokens, start // self.layout.group_tokens)
        state = self._sequences[sequence]
        pages = state.tokens[layer].pages[:, groups.start : groups.stop]
        tags = state.token_tags.of(np.arange(groups.start, groups.stop))
        keys = self.pages.token_keys(tags, layer, groups)[..., 0]
        read = self.read(pages.reshape(-1), keys.reshape(-1))
        stored = self.pages.k_values(read.data).reshape(self.shape.kv_heads, start - first, self.shape.dim)
        return np.concatenate([stored, k[:, : end - start]], axis=1)

    def _complete_index(self) -> None:
        """Make the index blocks that a sequence lacks, whose user died between KV page groups and index.

        One for which there is no room ends before them.
        """
        pages_per_block = self.pages.index_layout.pages
        for sequence in self._sequences:
            state = self._sequences[sequence]
            for layer in range(self.shape.layers):
                have, needed = (
                    state.index[layer].pages.shape[1] // pages_per_block,
                    int(state.lengths[layer]) // self.layout.block_tokens,
                )
                try:
                    if have < needed:
                        self._make_index(sequence, layer, range(have, needed))
                except StorageFullError:
                    self._sequences.crop(sequence, (have + 1) * self.layout.block_tokens - self.layout.group_tokens)

    def _make_index(self, sequence: int, layer: int, blocks: range) -> None:
        state = self._sequences[sequence]
        keys = self.pages.index_keys(state.index_tags.of(np.arange(blocks.start, blocks.stop)), layer, blocks)
        queues = self._index_queues(keys)
        need = np.zeros((len(PageKind), self.flash.geometry.lun_queues), np.int64)
        need[PageKind.INDEX] = np.bincount(queues, minlength=need.shape[1])
        self._pool.make_room(need)
        nothing = np.zeros((self.shape.kv_heads, 0, self.shape.dim), np.float16)
        k = self._read_blocks(sequence, layer, nothing, blocks.stop * self.layout.block_tokens, blocks)
        pages = self._pool.put(PageKind.INDEX, self.pages.index_pages(keys, k), queues, Cause.INDEX)
        state.index[layer].extend(pages.reshape(self.shape.kv_heads, keys[0].size))

    def _keep_partial_groups(self) -> None:
        """Program the tokens after the last full groups; all full ones are durable. Raises StorageFullError."""
        size = self.layout.group_tokens
        for number in self._sequences:
            state = self._sequences[number]
            tokens = int(state.lengths.min())
            if state.partial is not None and state.partial.tokens // size < tokens // size:
                self._sequences.drop_partial_group(number)
            known = 0 if state.partial is None else state.partial.tokens
            if tokens % size and tokens != known and tokens == state.lengths.max():
                partial = self._program_partial_group(number, tokens)
                self._pool.flush()
                self._sequences.set_partial_group(number, partial)

    def _program_partial_group(self, sequence: int, tokens: int) -> PartialGroup:
        """A group of each head that has the tokens after the last full one, then zeros."""
        state, size, shape = self._sequences[sequence], self.layout.group_tokens, self.shape
        number, used, group = self._sequences.new_number(), tokens % size, range(tokens // size, tokens // size + 1)
        keys = [self.pages.token_keys(number, layer, group) for layer in range(shape.layers)]
        queues = [self._token_queues(tags) for tags in keys]
        need = np.zeros((len(PageKind), self.flash.geometry.lun_queues), np.int64)
        need[PageKind.TOKEN] = np.bincount(np.concatenate(queues), minlength=need.shape[1])
        self._pool.make_room(need)
        pages = np.empty((shape.layers, shape.kv_heads), np.int64)
        for layer in range(shape.layers):
            kv = np.zeros((2, shape.kv_heads, size, shape.dim), np.float16)
            suffix = state.suffix(layer)
            kv[:, :, :used] = suffix[:, :, suffix.shape[2] - used :]
            batch = self.pages.token_pages(keys[layer], *kv)
            put = self._pool.put(PageKind.TOKEN, batch, queues[layer], Cause.PARTIAL)
            pages[layer] = put.reshape(keys[layer].shape)[:, 0, 0]
        return PartialGroup(tokens, number, pages)

    def _token_queues(self, keys: PageKeys) -> NDArray[np.int64]:
        """The LUN queue of each page: a head's groups go round channels and luns."""
        turn = keys["sequence"].astype(np.int64) + keys["layer"] + keys["head"] + keys["index"]
        queues: NDArray[np.int64] = turn.reshape(-1) % self.flash.geometry.lun_queues
        return queues

    def _index_queues(self, keys: PageKeys) -> NDArray[np.int64]:
        """The LUN queue of each page: a head's blocks go round channels, a block's pages round the LUNs of one."""
        geometry = self.flash.geometry
        pages = self.pages.index_layout.pages
        turn = keys["sequence"].astype(np.int64) + keys["layer"] + keys["head"] + keys["index"] // pages
        lun = (turn // geometry.channels + keys["index"] % pages) % geometry.luns
        queues: NDArray[np.int64] = (turn % geometry.channels + geometry.channels * lun).reshape(-1)
        return queues
