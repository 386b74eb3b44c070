"""Hidden states of the batches that wait for their next layer: kept, in the host's memory, or on disk.

A waiting batch's tensor stays the object that the model's code holds; its memory is given back and taken again.
"""

import torch
from torch import Tensor

from nearflash.abi.errors import StateError
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.direct import DirectFile

__all__ = ["Parked"]


class Parked:
    """The hidden states of one batch on one tier, as long as it waits. offset_bytes, room_bytes: of the file."""

    def __init__(
        self, tier: str, link: DeviceLink, ledger: Ledger, file: DirectFile | None = None, offset_bytes: int = 0,
        room_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._tier, self._link, self._ledger, self._file = tier, link, ledger, file
        self._offset, self._room_bytes = offset_bytes, room_bytes
        self._tensor: Tensor | None = None
        self._copy: Tensor | None = None
        self._size = self._checksum = 0

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
            padded = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            if self._file is None or padded > self._room_bytes:
                return
            memory = self._link.host_memory(padded)
            self._link.pull("activations", flat, memory[:size])
            self._checksum = crc32c(memory.numpy())
            self._file.write(self._offset, memory.numpy())
            self._ledger.count_bytes("activations host to disk", padded)
        else:
            self._copy = self._link.host_memory(size)
            self._link.pull("activations", flat, self._copy)
        del flat
        self._tensor, self._size = states, size
        states.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Have the hidden states where they were. Raises StateError where other bytes come back than were written."""
        states, size = self._tensor, self._size
        if states is None:
            return
        self._tensor = None
        states.untyped_storage().resize_(size)
        flat = states.reshape(-1).view(torch.uint8)
        if self._copy is not None:
            self._link.push("activations", self._copy, flat)
            self._copy = None
            return
        assert self._file is not None
        memory = self._link.host_memory(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
        self._file.read(self._offset, memory.numpy())
        if crc32c(memory.numpy()) != self._checksum:
            where = f"bytes {self._offset} to {self._offset + len(memory)} of the scratch file"
            raise StateError(f"hidden states must be those that were written, but {where} have another checksum: check "
                             "the drive (dmesg, smartctl), and run again")  # fmt: skip
        self._link.push("activations", memory[:size], flat)
        self._ledger.count_bytes("activations disk to host", len(memory))
