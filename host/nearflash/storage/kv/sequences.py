"""The sequences of a store: made, forked, cropped and freed; which of them hold a page.

Pages are programmed once, so forks share them, and a crop gives pages back but writes none. On a flash that outlasts
its user no two pages have the same key and other contents: after a fork or a crop what follows goes by another number.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import CommandError
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageData, PageKeys
from nearflash.storage.kv.journal import JournalEntry, SequenceJournal
from nearflash.storage.kv.layout import KvLayout
from nearflash.storage.kv.pages import F16, PageMaker
from nearflash.storage.kv.recovery import FoundPages
from nearflash.storage.kv.sequence import PartialGroup, StoredSequence, Tags
from nearflash.storage.kv.space import BlockSpace

__all__ = ["Sequences"]

_TAGS = 1 << 32
"""Numbers that a page tag has room for."""
_READ_BYTES = 16 << 20
"""Pages that a crop reads at once."""


class Sequences:
    """Their states by number; `durable`: the flash outlasts its user. Other options are KvStore's."""

    def __init__(
        self, pages: PageMaker, space: BlockSpace, read: Callable[[PageNumbers, PageKeys], PageData], *,
        suffix_bytes: int, durable: bool, journal: SequenceJournal | None = None,
    ) -> None:  # fmt: skip
        self._maker, self._space, self._read = pages, space, read
        self._suffix_bytes, self._durable, self._journal = suffix_bytes, durable, journal
        self._states: dict[int, StoredSequence] = {}
        self._holders: dict[int, set[int]] = {}
        """Sequences with pages that go by a number."""
        self._next = 0
        self._used: set[int] = set()
        """Numbers that pages of the journal and the flash go by, as they were found."""
        # Other stores, and files that go on from copies of this one, begin elsewhere: their pages are never ours.
        self._next_tag = 0 if journal is None else zlib.crc32(journal.store.encode())

    def __getitem__(self, number: int) -> StoredSequence:
        """Raises CommandError for one that is not there."""
        if number not in self._states:
            raise CommandError(f"sequence must be one that was added and not freed, not {number!r}")
        return self._states[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    @property
    def suffix_bytes(self) -> int:
        """Memory for unindexed suffixes, and for the last groups of the other sequences."""
        return sum(state.suffix_bytes for state in self._states.values())

    def add(self) -> int:
        """A new one's number."""
        number, tag = self._new_sequence()
        state = StoredSequence(self._maker.shape, self._layout, self._suffix_tokens(), tag)
        self._note(number, state.token_tags, state.index_tags)
        self._hold(number, state)
        return number

    def fork(self, number: int) -> int:
        """A new one that holds the same tokens. Raises CommandError while some layers have more tokens than others."""
        parent = self[number]
        tokens = int(parent.lengths.max())
        if parent.lengths.min() < tokens:
            raise CommandError(f"sequence {number} must have as many tokens in every layer to be forked; crop it first")
        new_number, tag = self._new_sequence()
        whole = self._suffix_tokens()
        child = StoredSequence(self._maker.shape, self._layout, min(whole, parent.suffix_tokens), tag)
        child.token_tags, child.index_tags = parent.token_tags, parent.index_tags
        if self._durable:
            child.token_tags = parent.token_tags.then(tokens // self._layout.group_tokens, tag)
            child.index_tags = parent.index_tags.then(tokens // self._layout.block_tokens, tag)
        child.tokens, child.index = [[table.copy() for table in tables] for tables in (parent.tokens, parent.index)]
        child.v_sum = parent.v_sum.copy()
        for layer in range(self._maker.shape.layers):
            used = tokens % child.suffix_tokens
            kv = parent.suffix(layer)
            child.set_suffix(layer, kv[:, :, kv.shape[2] - used :], tokens)
        self._note(new_number, child.token_tags, child.index_tags)
        self._space.share(child.pages(self._layout.group_pages))
        self._hold(new_number, child)
        return new_number

    def crop(self, number: int, length: int) -> None:
        """Keep the first `length` tokens.

        Raises CommandError for more than every layer has, PageError; then nothing is changed.
        """
        state = self[number]
        if not 0 <= length <= int(state.lengths.min()):
            raise CommandError(
                f"length must be 0 to {int(state.lengths.min())}, the tokens of sequence {number}, not {length!r}"
            )
        layers = range(self._maker.shape.layers)
        start = length // state.suffix_tokens * state.suffix_tokens
        kept = [self._tokens(number, layer, start, length) for layer in layers]
        sums = [self._v_sum_of_first(number, layer, length) for layer in layers]
        groups, blocks = length // self._layout.group_tokens, length // self._layout.block_tokens
        dropped = []
        if state.partial is not None and length < state.partial.tokens:
            self.drop_partial_group(number)
        if self._durable and length < int(state.lengths.max()):
            # Also where no whole group is cut: what was noted before must not come to be of the tokens after.
            tag = self.new_number()
            tags = state.token_tags.then(groups, tag), state.index_tags.then(blocks, tag)
            self._note(number, *tags)
            state.token_tags, state.index_tags = tags
            self._hold(number, state)
        for layer in layers:
            tokens = state.tokens[layer].truncate(groups).reshape(-1, 1) + np.arange(self._layout.group_pages)
            dropped += [tokens.ravel(), state.index[layer].truncate(blocks * self._maker.index_layout.pages).ravel()]
            state.set_suffix(layer, kept[layer], length)
            state.v_sum[layer] = sums[layer]
        self._space.release(np.concatenate(dropped))

    def set_partial_group(self, number: int, partial: PartialGroup) -> None:
        """The last tokens are on flash, durable, where `partial` says, and no longer where they were.

        With a journal alone. Raises StateError.
        """
        assert self._journal is not None, "called with a journal"
        state = self[number]
        unused: PartialGroup | None = partial
        try:
            self._journal.keep_partial_group(number, (partial.tokens, partial.number))
            self._journal.sync()  # before the other one's pages may be erased
            unused, state.partial = state.partial, partial
        finally:
            if unused is not None:
                self._space.release(unused.all_pages(self._layout.group_pages))
        self._hold(number, state)

    def drop_partial_group(self, number: int) -> None:
        """Give the pages of the last tokens back: they are cut off, or full groups have come after them."""
        state = self[number]
        assert self._journal is not None and state.partial is not None, "a kept sequence with a partial group"
        self._journal.keep_partial_group(number, None)
        pages, state.partial = state.partial.all_pages(self._layout.group_pages), None
        self._space.release(pages)

    def free(self, number: int) -> None:
        """Forget one; pages that no other holds are dead. Raises CommandError."""
        state = self[number]
        pages = state.pages(self._layout.group_pages)
        if self._journal is not None:
            self._journal.free(number)
        self._space.release(pages)
        if state.partial is not None:
            self._space.release(state.partial.all_pages(self._layout.group_pages))
        del self._states[number]
        self._holders = {tag: left for tag, holders in self._holders.items() if (left := holders - {number})}

    def note_moves(self, keys: PageKeys, old: PageNumbers, new: PageNumbers) -> None:
        """Pages have other numbers: V's are found by K's."""
        for key, before, after in zip(keys, old.tolist(), new.tolist(), strict=True):
            if key["first"]:
                continue
            head_and_index = int(key["head"]), int(key["index"])
            for number in self._holders.get(int(key["sequence"]), ()):
                state = self._states[number]
                table = (state.tokens if key["kind"] == PageKind.TOKEN else state.index)[int(key["layer"])]
                table.replace(head_and_index, before, after)
                if state.partial is not None and state.partial.number == key["sequence"]:
                    state.partial.pages[key["layer"], key["head"]] = after

    def restore(self, found: FoundPages) -> None:
        """The sequences of the journal, their pages as they were found; the index may lack blocks at the end.

        What comes next goes by a number of its own: pages that were left out here may lie there. Raises PageError.
        """
        assert self._journal is not None, "called with a journal"
        entries, sums = dict(self._journal.entries), self._journal.sums or {}
        tags = (tag for entry in entries.values() for tag in (*entry.token_tags.numbers, *entry.index_tags.numbers))
        partial = (entry.partial[1] for entry in entries.values() if entry.partial is not None)
        self._next, self._used = max(entries, default=-1) + 1, {*found.numbers, *tags, *partial}
        size, block = self._layout.group_tokens, self._layout.block_tokens
        pages = self._tables(found, entries, np.zeros(0, np.int64))
        if (avoid := found.redundant_blocks(pages)).size:
            pages = self._tables(found, entries, avoid)
        self._space.restore(found.ends, found.kinds, pages, found.keys)
        for number, state in self._states.items():
            tokens, tag = int(state.lengths[0]), self.new_number()
            known, v_sum = sums.get(number, (-1, np.zeros(0)))
            is_known = known == tokens and v_sum.size == state.v_sum.size
            for layer in range(self._maker.shape.layers):
                first = state.memory_start(layer)
                state.set_suffix(layer, self._read_programmed(number, layer, first, tokens), tokens)
                if not is_known:
                    state.v_sum[layer] = self._v_sum(number, layer, 0, tokens)
            if is_known:
                state.v_sum[:] = v_sum.reshape(state.v_sum.shape)
            new_tags = state.token_tags.then(tokens // size, tag), state.index_tags.then(tokens // block, tag)
            if state.partial is None and entries[number].partial is not None:
                self._journal.keep_partial_group(number, None)  # nor may it become the end of other tokens
            self._note(number, *new_tags)
            state.token_tags, state.index_tags = new_tags
            self._hold(number, state)
            if state.partial is not None:
                self._restore_partial_group(state, state.partial)

    def _restore_partial_group(self, state: StoredSequence, partial: PartialGroup) -> None:
        """Have the last tokens, which are on flash, in memory."""
        size, shape = self._layout.group_tokens, self._maker.shape
        group = range(partial.tokens // size, partial.tokens // size + 1)
        for layer in range(shape.layers):
            keys = self._maker.token_keys(partial.number, layer, group)
            pages = partial.pages[layer][:, None] + np.arange(self._layout.group_pages)
            read = self._read(pages.reshape(-1), keys.reshape(-1))
            k, v = self._maker.values(read.data)[:, :, : partial.tokens % size]
            state.push(layer, k, v)
            state.v_sum[layer] += v.sum(axis=1, dtype=np.float64)

    def _tables(
        self, found: FoundPages, entries: Mapping[int, JournalEntry], avoid: NDArray[np.int64]
    ) -> PageNumbers:  # fmt: skip
        """Set the states of sequences as they are found; their pages, once for each sequence that holds them."""
        size, block = self._layout.group_tokens, self._layout.block_tokens
        for number, entry in entries.items():
            state = StoredSequence(self._maker.shape, self._layout, self._suffix_tokens(), number)
            state.token_tags, state.index_tags = entry.token_tags, entry.index_tags
            groups = found.tables(PageKind.TOKEN, state.token_tags, avoid)
            index = found.tables(PageKind.INDEX, state.index_tags, avoid)
            count = min(table.shape[1] for table in groups)
            blocks = count * size // block
            for layer, table in enumerate(groups):
                state.tokens[layer].extend(table[:, :count])
                state.index[layer].extend(index[layer][:, : blocks * self._maker.index_layout.pages])
            state.lengths[:] = count * size
            self._states[number] = state
            if entry.partial is not None and entry.partial[0] // size == count:
                pages = found.group(entry.partial[1], count, avoid)
                state.partial = None if pages is None else PartialGroup(*entry.partial, pages)
        page_lists = [state.pages(self._layout.group_pages) for state in self._states.values()]
        last = [state.partial for state in self._states.values() if state.partial is not None]
        partly = [partial.all_pages(self._layout.group_pages) for partial in last]
        return np.concatenate([np.zeros(0, np.int64), *page_lists, *partly])

    def group_sums(self) -> dict[int, tuple[int, NDArray[np.float64]]]:
        """Tokens of whole KV page groups, and the sums of their V, by sequence, of those whose layers are as long."""
        sums, size = {}, self._layout.group_tokens
        for number, state in self._states.items():
            tokens = int(state.lengths[0])
            if (state.lengths == tokens).all():
                whole = tokens // size * size
                last = [
                    self._tokens(number, layer, whole, tokens)[1].sum(axis=1, dtype=np.float64)
                    for layer in range(self._maker.shape.layers)
                ]
                sums[number] = whole, state.v_sum - np.stack(last)
        return sums

    def _note(self, number: int, token_tags: Tags, index_tags: Tags) -> None:
        if self._journal is not None:
            self._journal.place(number, token_tags, index_tags)

    @property
    def _layout(self) -> KvLayout:
        return self._maker.layout

    def new_number(self) -> int:
        """For pages to come, which none goes by."""
        while self._next_tag in self._used:
            self._next_tag = (self._next_tag + 1) % _TAGS
        number, self._next_tag = self._next_tag, (self._next_tag + 1) % _TAGS
        return number

    def _new_sequence(self) -> tuple[int, int]:
        """A sequence's number, and the one that its pages go by."""
        self._next += 1
        return self._next - 1, self.new_number()

    def _hold(self, number: int, state: StoredSequence) -> None:
        self._states[number] = state
        last = () if state.partial is None else (state.partial.number,)
        for tag in (*state.token_tags.numbers, *state.index_tags.numbers, *last):
            self._holders.setdefault(tag, set()).add(number)

    def _suffix_tokens(self) -> int:
        """T where there is memory for one more suffix of that length, else n."""
        whole = self._layout.block_tokens
        kept = sum(state.suffix_tokens == whole for state in self._states.values())
        has_room = (kept + 1) * whole * self._maker.shape.token_bytes <= self._suffix_bytes
        return whole if has_room else self._layout.group_tokens

    def _v_sum_of_first(self, number: int, layer: int, length: int) -> NDArray[np.float64]:
        """Sum of the values of the first `length` tokens, (heads, d), by the shorter way. Sums are exact."""
        end, every = int(self[number].lengths[layer]), self[number].v_sum[layer]
        if 2 * length < end:
            return self._v_sum(number, layer, 0, length)
        kept: NDArray[np.float64] = every - self._v_sum(number, layer, length, end)
        return kept

    def _v_sum(self, number: int, layer: int, start: int, end: int) -> NDArray[np.float64]:
        """The sum of the values of tokens [start, end), (heads, d)."""
        shape = self._maker.shape
        group_bytes = shape.kv_heads * self._layout.group_pages * self._layout.page_bytes
        step = max(_READ_BYTES // group_bytes, 1) * self._layout.group_tokens
        total = np.zeros((shape.kv_heads, shape.dim))
        for first in range(start, end, step):
            v = self._tokens(number, layer, first, min(first + step, end))[1]
            total += v.sum(axis=1, dtype=np.float64)
        return total

    def _tokens(self, number: int, layer: int, first: int, end: int) -> F16:
        """K and V of tokens [first, end), (2, heads, t, d), from memory or their pages. Raises PageError."""
        memory = self[number].memory_start(layer)
        stored = self._read_programmed(number, layer, first, min(end, memory))
        if end <= memory:
            return stored
        return np.concatenate([stored, self[number].suffix(layer)[:, :, max(first - memory, 0) : end - memory]], axis=2)

    def _read_programmed(self, number: int, layer: int, first: int, end: int) -> F16:
        """K and V of tokens [first, end) from their pages, (2, heads, t, d). Raises PageError."""
        state, size, shape = self[number], self._layout.group_tokens, self._maker.shape
        if first >= end:
            return np.zeros((2, shape.kv_heads, 0, shape.dim), np.float16)
        groups = range(first // size, -(-end // size))
        numbers = state.tokens[layer].pages[:, groups.start : groups.stop, None]
        keys = self._maker.token_keys(state.token_tags.of(np.arange(groups.start, groups.stop)), layer, groups)
        read = self._read((numbers + np.arange(self._layout.group_pages)).reshape(-1), keys.reshape(-1))
        kv = self._maker.values(read.data).reshape(2, shape.kv_heads, len(groups) * size, shape.dim)
        return kv[:, :, first - groups.start * size : end - groups.start * size]
