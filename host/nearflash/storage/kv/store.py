"""K and V of sequences on a flash: appended token by token or many at once, found by sequence, layer and head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import Owner, PageKind
from nearflash.abi.errors import CommandError, FormatError, PageError, ShapeError
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.page import PageBatch, PageData, PageKeys, page_array
from nearflash.storage.kv.layout import KvLayout, KvShape
from nearflash.storage.kv.pages import PageMaker
from nearflash.storage.kv.sequence import StoredSequence
from nearflash.storage.kv.space import BlockSpace
from nearflash.storage.kv.stage import Stage
from nearflash.storage.kv.statistics import Cause, KvStatistics

__all__ = ["KvStore", "StoredHead"]

F16 = NDArray[np.float16]
DEFAULT_BUFFER_BYTES = 16 << 20
DEFAULT_READ_LIMIT = 100_000


@dataclass(frozen=True)
class StoredHead:
    """Where K and V of one head are, or of all heads of a layer: every array then begins with an axis of heads.

    Page numbers and views hold until the store's next `append`, `free` or `flush`.
    """

    owner: Owner
    """Of the first head."""
    tokens: int
    """S."""
    token_pages: PageNumbers
    """Of the full token groups; of separate ones K's page, V's being the next."""
    index_pages: PageNumbers
    tail_k: F16
    """(u, d): tokens behind the last full group."""
    tail_v: F16
    v_mean: NDArray[np.float32]
    """(d,): of all values."""


class KvStore:
    """Sequences on a flash that is used for nothing else. Calls come from one thread at a time.

    Pages are staged in `buffer_bytes` and programmed when those are full; in the `background` by a thread, whose first
    error every later call raises. A block read more than `read_limit` times since its erase is moved by the next
    `append` or `flush`.

    Raises CommandError where layout, shape and flash do not fit together.
    """

    def __init__(
        self, flash: Flash, shape: KvShape, layout: KvLayout, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        background: bool = False, read_limit: int = DEFAULT_READ_LIMIT,
    ) -> None:  # fmt: skip
        geometry = flash.geometry
        if geometry.page_bytes != layout.page_bytes:
            raise CommandError(f"page_bytes must be the flash's {geometry.page_bytes}, not {layout.page_bytes}")
        if geometry.blocks // geometry.lanes < 3:
            raise CommandError(f"blocks must be at least 3 on each unit of each channel, not {geometry.blocks}")
        if geometry.pages_per_block % layout.group_pages:
            raise CommandError(f"pages_per_block must be even for separate groups, not {geometry.pages_per_block}")
        self.flash, self.shape, self.layout = flash, shape, layout
        self.pages = PageMaker(shape, layout)
        self._read_limit = read_limit
        self._sequences: dict[int, StoredSequence] = {}
        self._next = 0
        self._space = BlockSpace(geometry)
        self._stage = Stage(flash, buffer_bytes, background=background)
        self._host_bytes = self._read_pages = 0
        self._programmed = dict.fromkeys(Cause, 0)

    # Sequences

    @property
    def lengths(self) -> Mapping[int, int]:
        """Tokens that every layer has, by sequence."""
        return {number: int(sequence.lengths.min()) for number, sequence in self._sequences.items()}

    def add(self) -> int:
        """A new sequence's number."""
        number, self._next = self._next, self._next + 1
        self._sequences[number] = StoredSequence(self.shape, self.layout)
        return number

    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages are erased when their blocks are needed. Raises CommandError."""
        self._space.release(self._sequence(sequence).pages(self.layout.group_pages))
        del self._sequences[sequence]

    # Writing

    def append(self, sequence: int, layer: int, k: F16, v: F16) -> None:
        """Store k and v (kv_heads, t, d) of t tokens behind what is there.

        Raises CommandError, ShapeError and FormatError; StorageFullError before anything changed; what a program or
        an erase raised before, and PageError where pages that must be moved or indexed cannot be read.
        """
        self._stage.check()
        state = self._sequence(sequence)
        self._check(layer, k, v)
        self._reclaim()
        start, size = int(state.lengths[layer]), self.layout.group_tokens
        tail = start % size
        k_all, v_all = (np.concatenate([old[layer, :, :tail], new], axis=1)
                        for old, new in ((state.tail_k, k), (state.tail_v, v)))  # fmt: skip
        end, block = start + k.shape[1], self.layout.block_tokens
        groups, blocks = range(start // size, end // size), range(start // block, end // block)
        token_keys = self.pages.token_keys(sequence, layer, groups)
        index_keys = self.pages.index_keys(sequence, layer, blocks)
        lanes = self._token_lanes(token_keys), self._index_lanes(index_keys)
        self._make_room(lanes)
        indexed = self._indexed(state, layer, k_all, groups.start * size, blocks)

        full = len(groups) * size
        if groups:
            batch = self.pages.token_pages(token_keys, k_all[:, :full], v_all[:, :full])
            pages = self._store(PageKind.TOKEN, batch, lanes[0], Cause.TOKEN)
            state.tokens[layer].extend(pages.reshape(token_keys.shape)[..., 0])
        if blocks:
            pages = self._store(PageKind.INDEX, self.pages.index_pages(index_keys, indexed), lanes[1], Cause.INDEX)
            state.index[layer].extend(pages.reshape(self.shape.kv_heads, len(blocks) * self.pages.index_layout.pages))
        left = k_all.shape[1] - full
        state.tail_k[layer, :, :left], state.tail_v[layer, :, :left] = k_all[:, full:], v_all[:, full:]
        state.v_sum[layer] += v.sum(axis=1, dtype=np.float64)
        state.lengths[layer] = end
        self._host_bytes += k.nbytes + v.nbytes

    def flush(self) -> None:
        """Program what is staged, and return when it is durable. Groups that are not full stay in memory."""
        self._reclaim()
        self._stage.flush()
        self.flash.sync()

    def close(self) -> None:
        """Program what is staged and release the flash; it may be called twice. Raises what programming raised."""
        try:
            if self._open:
                self._stage.flush()
        finally:
            self._open = False
            self._stage.close()
            self.flash.close()

    _open = True

    # Reading

    def head(self, sequence: int, layer: int, head: int) -> StoredHead:
        """Where a head's K and V are. Raises CommandError."""
        if not 0 <= head < self.shape.kv_heads:
            raise CommandError(f"head must be 0 to {self.shape.kv_heads - 1}, not {head!r}")
        return self._stored(sequence, layer, head, head)

    def layer(self, sequence: int, layer: int) -> StoredHead:
        """Where K and V of all heads of a layer are. Raises CommandError."""
        return self._stored(sequence, layer, 0, slice(None))

    def read(self, pages: PageNumbers, expected: PageKeys) -> PageData:
        """Pages as `head` gave them, from flash or from the stage. Raises PageError that names the tokens lost."""
        slots = self._stage.find(pages)
        staged, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        self.count_reads(pages[missing])
        try:
            if not staged.size:
                return self.flash.read(pages, expected)
            found = self._stage.get(slots[staged])
            if (found.keys != expected[staged]).any():
                raise PageError("pages must be read before the next append, free or flush")
            read = self.flash.read(pages[missing], expected[missing])
        except PageError as error:
            lost = "; ".join(self.layout.describe(key, self.shape.dim) for _, key in error.pages[:4])
            raise PageError(f"{error}: {lost}", error.pages) from error
        aux = np.empty((len(pages), *found.aux.shape[1:]), np.uint8)
        both = PageData(page_array(len(pages), self.layout.page_bytes), aux)
        for rows, part in ((staged, found), (missing, read)):
            both.data[rows], both.aux[rows] = part.data, part.aux
        return both

    def count_reads(self, pages: PageNumbers) -> None:
        """Count pages that were read, by `read` or by a device: blocks read often are moved."""
        np.add.at(self._space.reads, pages // self.flash.geometry.pages_per_block, 1)
        self._read_pages += len(pages)

    def table(self, pages: PageNumbers) -> NDArray[np.uint64]:
        """Words of a device's page table; what is staged is programmed before. Raises CommandError."""
        self._stage.flush()
        return self.flash.entries(pages)

    @property
    def statistics(self) -> KvStatistics:
        """What was done so far."""
        return KvStatistics(
            self._host_bytes, self._read_pages, dict(self._programmed), self.layout.page_bytes,
            self._space.live_pages, self._space.erases.copy(), self._space.reads.copy(),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts

    def _sequence(self, number: int) -> StoredSequence:
        if number not in self._sequences:
            raise CommandError(f"sequence must be one that was added and not freed, not {number!r}")
        return self._sequences[number]

    def _stored(self, sequence: int, layer: int, first: int, heads: int | slice) -> StoredHead:
        state = self._sequence(sequence)
        self._check_layer(layer)
        tokens = int(state.lengths[layer])
        tail = tokens % self.layout.group_tokens
        return StoredHead(
            Owner(sequence, layer, first), tokens, state.tokens[layer].pages[heads], state.index[layer].pages[heads],
            state.tail_k[layer, heads, ..., :tail, :], state.tail_v[layer, heads, ..., :tail, :],
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

    def _indexed(self, state: StoredSequence, layer: int, k: F16, start: int, blocks: range) -> F16:
        """K of whole blocks, (heads, tokens, d), of which k holds the tokens from `start` on."""
        first, end = blocks.start * self.layout.block_tokens, blocks.stop * self.layout.block_tokens
        if not blocks or first >= start:
            return k[:, first - start : end - start]
        size, heads = self.layout.group_tokens, self.shape.kv_heads
        groups = range(first // size, start // size)
        pages = state.tokens[layer].pages[:, groups.start : groups.stop].reshape(-1)
        read = self.read(pages, self._space.keys[pages])
        stored = self.pages.k_values(read.data).reshape(heads, start - first, self.shape.dim)
        return np.concatenate([stored, k[:, : end - start]], axis=1)

    def _token_lanes(self, keys: PageKeys) -> NDArray[np.int64]:
        """The lane of each page: a head's groups go round channels and units."""
        turn = keys["sequence"].astype(np.int64) + keys["layer"] + keys["head"] + keys["index"]
        lanes: NDArray[np.int64] = turn.reshape(-1) % self.flash.geometry.lanes
        return lanes

    def _index_lanes(self, keys: PageKeys) -> NDArray[np.int64]:
        """The lane of each page: a head's blocks go round channels, a block's pages round the units of one."""
        geometry = self.flash.geometry
        pages = self.pages.index_layout.pages
        turn = keys["sequence"].astype(np.int64) + keys["layer"] + keys["head"] + keys["index"] // pages
        unit = (turn // geometry.channels + keys["index"] % pages) % geometry.units
        lanes: NDArray[np.int64] = (turn % geometry.channels + geometry.channels * unit).reshape(-1)
        return lanes

    def _store(self, kind: PageKind, batch: PageBatch, lanes: NDArray[np.int64], cause: Cause) -> PageNumbers:
        """Give pages places, and stage them; their page numbers, in the order of the batch."""
        pages = np.empty(len(lanes), np.int64)
        for lane in np.unique(lanes):
            own = np.flatnonzero(lanes == lane)
            pages[own] = self._space.take(kind, int(lane), len(own))
        self._space.own(pages, batch.keys)
        self._stage.put(pages, batch)
        self._programmed[cause] += len(pages)
        return pages

    def _make_room(self, lanes: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
        """Move pages until there are free blocks enough for pages of both kinds in these lanes."""
        need = np.stack([np.bincount(lane, minlength=self.flash.geometry.lanes) for lane in lanes])
        self._space.check(need)
        while (lane := self._space.lacking(need)) is not None:
            self._move(self._space.victim(lane), Cause.COLLECTION)

    def _reclaim(self) -> None:
        self._stage.check()
        for block in self._space.disturbed(self._read_limit):
            self._move(block, Cause.DISTURB)

    def _move(self, block: int, cause: Cause) -> None:
        """Move a block's live pages to other blocks of its lane, and erase it."""
        old, lane = self._space.pages_of(block), block % self.flash.geometry.lanes
        if old.size:
            keys = self._space.keys[old]
            data = self.read(old, keys)
            kind = self._space.kind(block)
            self._space.close(block)
            new = self._store(kind, PageBatch(keys, data.data, data.aux), np.full(len(old), lane), cause)
            self._space.release(old)
            for page, key in zip(new, keys, strict=True):
                if not key["first"]:
                    state, layer = self._sequences[int(key["sequence"])], int(key["layer"])
                    tables = state.tokens if kind is PageKind.TOKEN else state.index
                    tables[layer].pages[key["head"], key["index"]] = page
        self._space.close(block)
        self._stage.erase(block)
        self._space.erase(block)
