"""Keys and values at rest: those of one layer and one batch, between two visits.

    rows, one for K and one for V of each sequence and KV head, (2·batch·heads, row_bytes) bytes
    a row: its tokens one after another, 16-bit elements or codes of 4 bits; whole blocks of 4096 bytes

On disk a row's last, incomplete block stays in the host's memory (its tail) and is written once it is complete: no byte
is written twice. A visit reads the blocks that its window needs, all rows at once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearflash.offload.groups import decode, encode, token_bytes
from nearflash.offload.link import host_memory
from nearflash.offload.report import Ledger
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile

__all__ = ["DiskRest", "KvForm", "MemoryRest", "Rest"]


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
        """Of one key at rest."""
        return token_bytes(self.dim, self.dtype, self.bits)

    @property
    def rows(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.heads

    @property
    def row_bytes(self) -> int:
        """At rest, whole blocks."""
        return -(-self.tokens * self.token_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """At rest."""
        return self.rows * self.row_bytes

    @property
    def dense(self) -> "KvForm":
        """As attention reads it."""
        return KvForm(self.batch, self.heads, self.tokens, self.dim, self.dtype)

    def states(self, memory: Tensor) -> Tensor:
        """Rows (size_bytes,) of 16-bit elements as keys and values, (2, batch, heads, tokens, dim)."""
        rows = memory[: self.size_bytes].view(self.rows, self.row_bytes).view(self.dtype)
        return rows[:, : self.tokens * self.dim].view(2, self.batch, self.heads, self.tokens, self.dim)


class Rest(ABC):
    """Where keys and values are between visits. `work` below is (2, batch, heads, tokens, dim)."""

    def __init__(self, form: KvForm) -> None:
        self.form = form

    @abstractmethod
    def load(self, work: Tensor, memory: Tensor, first: int, last: int) -> None:
        """Fill tokens `first` to `last` of `work`, whose rows are `memory`, (dense bytes,)."""

    @abstractmethod
    def store(self, work: Tensor, memory: Tensor, first: int, last: int) -> None:
        """Keep tokens `first` to `last`, which follow those that are kept."""


class MemoryRest(Rest):
    """In memory, of the host or of what computes."""

    def __init__(self, form: KvForm, ledger: Ledger, link: str) -> None:
        super().__init__(form)
        self.memory = host_memory(form.size_bytes)
        self._rows = self.memory.view(2, form.batch, form.heads, form.row_bytes)
        self._ledger, self._link = ledger, link

    def load(self, work: Tensor, memory: Tensor, first: int, last: int) -> None:
        """See Rest.load."""
        data = self._tokens(first, last)
        if self.form.bits == 16:
            work[..., first:last, :].copy_(data.view(self.form.dtype))
        else:
            decode(data, work[..., first:last, :])
        self._ledger.moved(f"cache {self._link}", data.numel())

    def store(self, work: Tensor, memory: Tensor, first: int, last: int) -> None:
        """See Rest.store."""
        states, data = work[..., first:last, :], self._tokens(first, last)
        if self.form.bits == 16:
            data.view(self.form.dtype).copy_(states)
        else:
            data.copy_(encode(states))
        self._ledger.moved(f"cache {' to '.join(reversed(self._link.split(' to ')))}", data.numel())

    def _tokens(self, first: int, last: int) -> Tensor:
        size = self.form.token_bytes
        return self._rows[..., first * size : last * size].unflatten(-1, (last - first, size))


class DiskRest(Rest):
    """In a part of a file, from `place` on; reads and writes whole blocks past the page cache."""

    def __init__(self, form: KvForm, file: DirectFile, place: int, ledger: Ledger) -> None:
        super().__init__(form)
        self._file, self._place, self._ledger = file, place, ledger
        self._tail = host_memory(form.rows * BLOCK_BYTES).view(form.rows, BLOCK_BYTES)

    @staticmethod
    def tail_bytes(form: KvForm) -> int:
        """Of the host's memory."""
        return form.rows * BLOCK_BYTES

    def load(self, work: Tensor, memory: Tensor, first: int, last: int) -> None:
        """See Rest.load."""
        size, form = self.form.token_bytes, self.form
        rows = self._rows(memory)
        begin, end = first * size // BLOCK_BYTES * BLOCK_BYTES, last * size // BLOCK_BYTES * BLOCK_BYTES
        if end > begin:
            offsets = self._place + np.arange(form.rows, dtype=np.int64) * form.row_bytes + begin
            self._file.read_many(offsets, rows.numpy()[:, begin:end])
            self._ledger.moved("cache disk to host", form.rows * (end - begin))
        rows[:, end : last * size] = self._tail[:, : last * size - end]
        if form.bits != 16:
            data = rows.view(2, form.batch, form.heads, form.row_bytes)[..., first * size : last * size]
            decode(data.unflatten(-1, (last - first, size)), work[..., first:last, :])

    def store(self, work: Tensor, memory: Tensor, first: int, last: int) -> None:
        """See Rest.store."""
        size, form = self.form.token_bytes, self.form
        rows = self._rows(memory)
        begin, end = first * size // BLOCK_BYTES * BLOCK_BYTES, last * size // BLOCK_BYTES * BLOCK_BYTES
        if form.bits != 16:
            rows[:, begin : first * size] = self._tail[:, : first * size - begin]
            target = rows.view(2, form.batch, form.heads, form.row_bytes)[..., first * size : last * size]
            target.unflatten(-1, (last - first, size)).copy_(encode(work[..., first:last, :]))
        if end > begin:
            part = rows.numpy()
            for row in range(form.rows):
                self._file.write(self._place + row * form.row_bytes + begin, part[row, begin:end])
            self._ledger.moved("cache host to disk", form.rows * (end - begin))
        self._tail[:, : last * size - end] = rows[:, end : last * size]

    def _rows(self, memory: Tensor) -> Tensor:
        """The rows of the work buffer; of codes, rows of their own behind it."""
        if self.form.bits != 16:
            memory = memory[self.form.dense.size_bytes :]
        return memory[: self.form.size_bytes].view(self.form.rows, self.form.row_bytes)
