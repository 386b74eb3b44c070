"""Keys and values at rest: those of one layer and one batch, between two visits.

Tokens lie one after another, each with all of its rows (K and V of each sequence and KV head), elements or codes of 4
bits: what a visit reads, and what it adds, lie together. So they cross a link, and codes come out of it as elements.

On disk the last, incomplete block stays in the host's memory (the tail) and is written once it is complete: no byte is
written twice. A visit reads the blocks that its window needs. Checksums of what is on disk stay in the host's memory, 4
bytes a unit of 128 KiB, each by its place: other bytes than were written there, another layer's too, are an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.errors import StateError
from nearflash.offload.cache.groups import decode, encode, token_bytes
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink, StagedBuffer, host_memory
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.direct import DirectFile

__all__ = ["DiskStorage", "KvForm", "KvStorage", "MemoryStorage"]

_UNIT_BYTES = 128 << 10
"""That share a checksum."""
_REQUEST_BYTES = 1 << 20
"""Of one read of several at a time."""


@dataclass(frozen=True)
class KvForm:
    """Shape and format of the keys and values of one layer and one batch."""

    batch: int
    heads: int
    tokens: int
    """That there is room for."""
    dim: int
    dtype: torch.dtype
    bits: int = 16

    @property
    def token_bytes(self) -> int:
        """Bytes of one key at rest."""
        return token_bytes(self.dim, self.dtype, self.bits)

    @property
    def rows(self) -> int:
        """Rows of keys and of values."""
        return 2 * self.batch * self.heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a row at rest, whole blocks."""
        return -(-self.tokens * self.token_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows at rest."""
        return self.rows * self.row_bytes

    @property
    def dense(self) -> "KvForm":
        """As attention reads it."""
        return KvForm(self.batch, self.heads, self.tokens, self.dim, self.dtype)

    def states(self, memory: Tensor) -> Tensor:
        """Rows (size_bytes,) of 16-bit elements as keys and values, (2, batch, heads, tokens, dim)."""
        rows = memory[: self.size_bytes].view(self.rows, self.row_bytes).view(self.dtype)
        return rows[:, : self.tokens * self.dim].view(2, self.batch, self.heads, self.tokens, self.dim)


class KvStorage(ABC):
    """Keys and values between visits; `memory` below is a buffer of `work_bytes` that a visit has: what is stored, and
    behind codes the elements that come out of them.
    """

    def __init__(self, form: KvForm) -> None:
        self.form = form

    @staticmethod
    def rest_bytes(form: KvForm) -> int:
        """Bytes of all tokens at rest, whole blocks."""
        return -(-form.tokens * form.rows * form.token_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @classmethod
    def work_bytes(cls, form: KvForm) -> int:
        """Bytes of a buffer: what is read, and of codes what comes out of them."""
        return cls.rest_bytes(form) + (form.dense.size_bytes if form.bits != 16 else 0)

    def states(self, memory: Tensor) -> Tensor:
        """Keys and values in a buffer, (2, batch, heads, tokens, dim): what is stored, or what came out of codes."""
        if self.form.bits != 16:
            return self.form.dense.states(memory[self.rest_bytes(self.form) :])
        return self._tokens(memory, 0, self.form.tokens).flatten(-2).view(self.form.dtype).view(
            self.form.tokens, 2, self.form.batch, self.form.heads, self.form.dim
        ).permute(1, 2, 3, 0, 4)  # fmt: skip

    def load(self, memory: Tensor, first: int, last: int) -> None:
        """Fill tokens `first` to `last` of a buffer's states. Raises what `_fetch` does."""
        self._fetch(memory, first, last)
        self._unpack(memory, first, last)

    def store(self, memory: Tensor, first: int, last: int) -> None:
        """Keep tokens `first` to `last`, which follow those that are kept."""
        self._pack(memory, first, last)
        self._keep(memory, first, last)

    def load_over(self, link: DeviceLink, buffer: StagedBuffer, first: int, last: int) -> None:
        """Begin to fill the states of a buffer's far memory."""
        self._fetch(buffer.host, first, last)
        with link.filling(buffer):
            link.push("cache", buffer.host, buffer.memory, [self._bounds(first, last)])
            self._unpack(buffer.memory, first, last)

    def store_over(self, link: DeviceLink, buffer: StagedBuffer, first: int, last: int) -> None:
        """Keep tokens of the states of a buffer's far memory."""
        with link.filling(buffer):
            self._pack(buffer.memory, first, last)
            link.pull("cache", buffer.memory, buffer.host, [self._bounds(first, last)])
        self._keep(buffer.host, first, last)

    @abstractmethod
    def _fetch(self, memory: Tensor, first: int, last: int) -> None:
        """Fill the stored bytes of tokens in a buffer."""

    @abstractmethod
    def _keep(self, memory: Tensor, first: int, last: int) -> None:
        """Keep the stored bytes of tokens in a buffer."""

    def _unpack(self, memory: Tensor, first: int, last: int) -> None:
        if self.form.bits != 16:
            decode(self._codes(memory, first, last), self.states(memory)[..., first:last, :])

    def _pack(self, memory: Tensor, first: int, last: int) -> None:
        if self.form.bits != 16:
            self._codes(memory, first, last).copy_(encode(self.states(memory)[..., first:last, :]))

    @property
    def _token_bytes(self) -> int:
        return self.form.rows * self.form.token_bytes

    def _bounds(self, first: int, last: int) -> tuple[int, int]:
        """The bytes of tokens, half open."""
        return first * self._token_bytes, last * self._token_bytes

    def _tokens(self, memory: Tensor, first: int, last: int) -> Tensor:
        """Bytes of tokens, (tokens, rows, bytes)."""
        return memory[slice(*self._bounds(first, last))].view(last - first, self.form.rows, self.form.token_bytes)

    def _codes(self, memory: Tensor, first: int, last: int) -> Tensor:
        """Codes of tokens, (2, batch, heads, tokens, bytes)."""
        form = self.form
        codes = self._tokens(memory, first, last).view(last - first, 2, form.batch, form.heads, form.token_bytes)
        return codes.permute(1, 2, 3, 0, 4)


class MemoryStorage(KvStorage):
    """In memory (stored_bytes,) uint8, of the host or, with `is_far`, of what computes."""

    def __init__(self, form: KvForm, memory: Tensor, ledger: Ledger, *, is_far: bool = False) -> None:
        super().__init__(form)
        self._memory, self._ledger, self._is_far = memory, ledger, is_far

    def load_over(self, link: DeviceLink, buffer: StagedBuffer, first: int, last: int) -> None:
        """See KvStorage.load_over; no staging buffer is wanted."""
        with link.filling(buffer):
            if link.one_memory or self._is_far:
                self._fetch(buffer.memory, first, last)
            else:
                link.push("cache", self._memory, buffer.memory, [self._bounds(first, last)])
            self._unpack(buffer.memory, first, last)

    def store_over(self, link: DeviceLink, buffer: StagedBuffer, first: int, last: int) -> None:
        """See KvStorage.store_over."""
        with link.filling(buffer):
            self._pack(buffer.memory, first, last)
            if link.one_memory or self._is_far:
                self._keep(buffer.memory, first, last)
            else:
                link.pull("cache", buffer.memory, self._memory, [self._bounds(first, last)])

    def _fetch(self, memory: Tensor, first: int, last: int) -> None:
        begin, end = self._bounds(first, last)
        memory[begin:end].copy_(self._memory[begin:end])
        self._ledger.count_bytes(f"cache {'gpu' if self._is_far else 'host'} to gpu", end - begin)

    def _keep(self, memory: Tensor, first: int, last: int) -> None:
        begin, end = self._bounds(first, last)
        self._memory[begin:end].copy_(memory[begin:end])
        self._ledger.count_bytes(f"cache gpu to {'gpu' if self._is_far else 'host'}", end - begin)


class DiskStorage(KvStorage):
    """In a part of a file, from `offset` on; reads and writes whole blocks past the page cache."""

    tail_bytes = BLOCK_BYTES
    """Of the host's memory."""

    def __init__(self, form: KvForm, file: DirectFile, offset: int, ledger: Ledger, what: str = "a layer") -> None:
        """what: whose keys and values they are, for errors."""
        super().__init__(form)
        self._file, self._offset, self._ledger, self._what = file, offset, ledger, what
        self._tail = host_memory(self.tail_bytes)
        self._checksums: list[int] = []
        """CRC32C of each unit, as far as it was written."""
        self._written_bytes = 0

    def _fetch(self, memory: Tensor, first: int, last: int) -> None:
        """See KvStorage. Raises StateError where other bytes come back than were written."""
        token = self._token_bytes
        begin, end = _whole(first * token), _whole(last * token)
        assert end == self._written_bytes
        begin -= begin % _UNIT_BYTES  # tokens before the first are nobody's in this buffer
        self._read(memory.numpy(), begin, end)
        self._check(memory.numpy(), begin, end)
        memory[end : last * token] = self._tail[: last * token - end]

    def _keep(self, memory: Tensor, first: int, last: int) -> None:
        token = self._token_bytes
        begin, end = _whole(first * token), _whole(last * token)
        memory[begin : first * token] = self._tail[: first * token - begin]
        if end > begin:
            self._file.write(self._offset + begin, memory.numpy()[begin:end])
            self._note(memory.numpy(), begin, end)
            self._ledger.count_bytes("cache host to disk", end - begin)
        self._tail[: last * token - end] = memory[end : last * token]

    def _note(self, area: NDArray[np.uint8], begin: int, end: int) -> None:
        """Keep the checksums of what follows that which was written before."""
        assert begin == self._written_bytes
        for start, stop in _units(begin, end):
            before = self._checksums.pop() if start % _UNIT_BYTES else 0
            self._checksums.append(crc32c(area[start:stop], before))
        self._written_bytes = end

    def _check(self, area: NDArray[np.uint8], begin: int, end: int) -> None:
        for start, stop in _units(begin, end):
            if crc32c(area[start:stop]) != self._checksums[start // _UNIT_BYTES]:
                where = f"bytes {self._offset + start} to {self._offset + stop} of the scratch file"
                raise StateError(f"keys and values of {self._what} must be those that were written, but {where} have "
                                 "another checksum: check the drive (dmesg, smartctl), and run again")  # fmt: skip

    def _read(self, area: NDArray[np.uint8], begin: int, end: int) -> None:
        """Equal requests of _REQUEST_BYTES or more, and what is left: fewer blocks than requests."""
        blocks = (end - begin) // BLOCK_BYTES
        count = max(1, (end - begin) // _REQUEST_BYTES)
        size = blocks // count * BLOCK_BYTES
        middle = begin + count * size
        if size:
            offsets = self._offset + begin + np.arange(count, dtype=np.int64) * size
            self._file.read_many(offsets, area[begin:middle].reshape(count, size))
        if end > middle:
            self._file.read(self._offset + middle, area[middle:end])
        self._ledger.count_bytes("cache disk to host", end - begin)


def _units(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of a range, each within a unit."""
    while begin < end:
        stop = min(begin - begin % _UNIT_BYTES + _UNIT_BYTES, end)
        yield begin, stop
        begin = stop


def _whole(size_bytes: int) -> int:
    """Bytes of whole blocks alone."""
    return size_bytes // BLOCK_BYTES * BLOCK_BYTES
