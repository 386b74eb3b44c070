"""Hidden states of the batches that wait for their next layer: kept, in the host's memory, or on disk.

A waiting batch's tensor stays the object that the model's code holds; its memory is given back and taken again. What
lies on disk is written behind the batch that computes, and read ahead of the next one.
"""

from concurrent.futures import Future

import torch
from torch import Tensor

from nearflash.abi.errors import StateError
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.direct import DirectFile
from nearflash.support.prefetch import Prefetcher
from nearflash.support.write_behind import WriteBehind

__all__ = ["Parked", "StatesFile"]


class StatesFile:
    """The file of a block's batches whose hidden states wait on disk: those of one are read ahead, and of one written
    behind, each in a thread. Close it.

    overlap: False: whoever parks and restores does it itself.
    """

    def __init__(self, file: DirectFile, link: DeviceLink, ledger: Ledger, *, overlap: bool = True) -> None:
        self._file, self._link, self._ledger, self._overlap = file, link, ledger, overlap
        self._writes = WriteBehind(1 if overlap else 0, "nearflash-states-write")
        self._reads: Prefetcher[Parked, Tensor] = Prefetcher("nearflash-states-read", self._read, limit=1)

    def write(self, parked: "Parked", flat: Tensor) -> "Future[None]":
        """Write the bytes of a batch's states, (n,) uint8, which may change when this returns."""
        memory = self._link.host_memory(-(-len(flat) // BLOCK_BYTES) * BLOCK_BYTES)
        self._link.pull("activations", flat, memory[: len(flat)])
        return self._writes.submit(self._write, parked, memory)

    def begin(self, parked: "Parked") -> None:
        """Begin to read what a batch wrote, unless another's are being read."""
        if self._overlap:
            self._reads.begin(parked)

    def take(self, parked: "Parked") -> Tensor:
        """Blocks of the bytes that a batch wrote, (n,) uint8. Raises StateError where they are others now, and what
        writing them raised.
        """
        return self._reads.take(parked) if parked in self._reads else self._read(parked)

    def close(self) -> None:
        """End both threads; may be called twice."""
        self._reads.close()
        self._writes.close()

    def _write(self, parked: "Parked", memory: Tensor) -> None:
        parked.checksum = crc32c(memory.numpy())
        self._file.write(parked.offset_bytes, memory.numpy())
        self._ledger.count_bytes("activations host to disk", len(memory))

    def _read(self, parked: "Parked") -> Tensor:
        parked.wait_until_written()
        memory = self._link.host_memory(-(-parked.size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        self._file.read(parked.offset_bytes, memory.numpy())
        if crc32c(memory.numpy()) != parked.checksum:
            where = f"bytes {parked.offset_bytes} to {parked.offset_bytes + len(memory)} of the scratch file"
            raise StateError(f"hidden states must be those that were written, but {where} have another checksum: check "
                             "the drive (dmesg, smartctl), and run again")  # fmt: skip
        self._ledger.count_bytes("activations disk to host", len(memory))
        return memory


class Parked:
    """The hidden states of one batch on one tier, as long as it waits. offset_bytes, room_bytes: of the file."""

    def __init__(
        self, tier: str, link: DeviceLink, file: StatesFile | None = None, offset_bytes: int = 0, room_bytes: int = 0
    ) -> None:
        self._tier, self._link, self._file = tier, link, file
        self.offset_bytes, self._room_bytes = offset_bytes, room_bytes
        self._tensor: Tensor | None = None
        self._copy: Tensor | None = None
        self._written: Future[None] | None = None
        self.size_bytes = self.checksum = 0
        """Of what was written last; the checksum with the padding to blocks."""

    def park(self, states: Tensor | None) -> None:
        """Give back the memory of a batch's hidden states, unless they stay where they are."""
        if states is None or states._base is not None:
            return  # a view of memory that others may use
        moves = self._tier == "disk" or (self._tier == "host" and not self._link.one_memory)
        size = states.numel() * states.element_size()
        if not moves or states.untyped_storage().nbytes() != size or not size:
            return
        flat = states.reshape(-1).view(torch.uint8)
        if self._tier == "disk":
            if self._file is None or size > self._room_bytes:
                return
            self.size_bytes, self._written = size, self._file.write(self, flat)
        else:
            self._copy = self._link.host_memory(size)
            self._link.pull("activations", flat, self._copy)
        del flat
        self._tensor = states
        states.untyped_storage().resize_(0)

    def begin(self) -> None:
        """Begin to read them, if they are on disk."""
        if self._tensor is not None and self._copy is None and self._file is not None:
            self._file.begin(self)

    def wait_until_written(self) -> None:
        """Raises what writing raised."""
        if self._written is not None:
            self._written.result()

    def restore(self) -> None:
        """Have the hidden states where they were. Raises StateError where other bytes come back than were written."""
        states = self._tensor
        if states is None:
            return
        self._tensor = None
        copy, self._copy = self._copy, None
        if copy is None:
            assert self._file is not None
            copy = self._file.take(self)[: self.size_bytes]
        states.untyped_storage().resize_(len(copy))
        self._link.push("activations", copy, states.reshape(-1).view(torch.uint8))
