"""Messages between ranks: small integers, tensors, and whether all of them succeeded.

Without a process group there is one rank, and nothing is sent. Only numbers and tensors travel, never pickled objects.
Each rank counts in the group's key-value store to how many exchanges it has come: so others can name who is missing.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import distributed

from nearflash.abi.errors import StateError

__all__ = ["Ranks"]

T = TypeVar("T")
_WORD = 1 << 64
_GRACE_S = 5.0
"""For ranks that are only late to come to an exchange that has failed."""


class Ranks:
    """The ranks of a process group (None: the default one), as one of them sees them.

    Every method is a collective: all ranks call it, in the same order. Raises StateError where a rank was lost, or did
    not come within the group's timeout.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        there = distributed.is_available() and distributed.is_initialized()
        self.rank: int = distributed.get_rank(group) if there else 0
        """This one."""
        self.count: int = distributed.get_world_size(group) if there else 1
        if self.rank < 0:
            raise StateError("group must hold this process, which is none of its ranks: construct it on its ranks only")
        self._devices = _devices(group) if self.count > 1 else []
        self._store = (
            distributed.distributed_c10d._get_process_group_store(_find_group(group)) if self.count > 1 else None
        )

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        """The words (unsigned, 64 bits) of each rank; all ranks give equally many."""
        if self.count == 1:
            return [list(words)]
        signed = [word - _WORD if word >= _WORD >> 1 else word for word in words]
        mine = torch.tensor(signed, dtype=torch.int64, device=self._devices[0])
        every = [torch.empty_like(mine) for _ in range(self.count)]
        self._count(self.rank, 1)
        with self._name_loss():
            distributed.all_gather(every, mine, group=self._group)
        return [[word % _WORD for word in words.tolist()] for words in every]

    def gather_float(self, value: float) -> list[float]:
        """The value of each rank, to the bit."""
        words = self.gather(struct.unpack("<Q", struct.pack("<d", value)))
        return [struct.unpack("<d", struct.pack("<Q", word))[0] for (word,) in words]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite the tensor with that of rank `source`."""
        if self.count == 1:
            return
        sent = tensor if tensor.device.type in self._devices and tensor.is_contiguous() else None
        if sent is None:
            device = tensor.device if tensor.device.type in self._devices else self._devices[0]
            sent = tensor.detach().to(device).contiguous()
        with self._name_loss():
            distributed.broadcast(sent, group=self._group, group_src=source)
        if sent is not tensor and self.rank != source:
            tensor.copy_(sent)

    def together(self, call: Callable[[], T], doing: str, undo: Callable[[T], object] = lambda _: None) -> T:
        """Return what `call` gives, once it has worked on every rank; else `undo` what it gave here, and raise.

        `call` uses no collective. Raises its own error where it failed, StateError where another rank's failed.
        """
        try:
            result = call()
        except BaseException:  # of whatever kind: the other ranks wait for this one's word
            self.gather([0])
            raise
        failed = [rank for rank, (good,) in enumerate(self.gather([1])) if not good]
        if failed:
            undo(result)
            raise StateError(f"{doing} must work on every rank, and failed on {failed}: see their errors")
        return result

    @contextmanager
    def _name_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of the backend: it knows of a connection, not of a run
            missing = self._find_missing()
            who = f"ranks {missing} were lost or did not come" if missing else "one was lost or did not come"
            raise StateError(
                f"every rank must answer, and {who} in time ({str(error).splitlines()[0]}): end the others and start "
                "all again with resume=True; they resume from the same step"
            ) from error

    def _find_missing(self) -> list[int]:
        """Ranks that have come to fewer exchanges than this one; none where that is not known."""
        end = time.monotonic() + _GRACE_S
        while True:
            counts = [self._count(rank, 0) for rank in range(self.count)]
            missing = [rank for rank, count in enumerate(counts) if count < counts[self.rank]]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(0.1)

    def _count(self, rank: int, more: int) -> int:
        """To how many exchanges a rank has come, with so many more; 0 where the store does not answer."""
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's store outlives the ranks
        with suppress(RuntimeError):  # it lives with a rank, or with the launcher
            return int(self._store.add(f"nearflash/{again}/{rank}", more)) if self._store is not None else 0
        return 0


def _find_group(group: distributed.ProcessGroup | None) -> distributed.ProcessGroup:
    world = group or distributed.group.WORLD
    assert world is not None, "there are several ranks"
    return world


def _devices(group: distributed.ProcessGroup | None) -> list[str]:
    """Kinds of devices whose tensors the group can send; memory of the host first, where it can."""
    kinds = [device.type for device in _find_group(group)._device_types]
    return sorted(kinds, key=lambda kind: kind != "cpu")
