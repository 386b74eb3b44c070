"""Transfers of an engine's jobs, each with a deadline after which it has failed, whatever the drive still does."""

import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from nearflash.abi.errors import CommandError, NearflashError
from nearflash.storage.blocks.transfer import BlockTransfer

__all__ = ["TransferJobs"]

J = TypeVar("J", bound=Hashable)


class TransferJobs(Generic[J]):
    """Jobs under way; calls come from one thread, the engine's scheduler, and none waits but `drain`."""

    def __init__(self, deadline_s: float) -> None:
        if not deadline_s > 0:
            raise CommandError(f"deadline_s must be above 0, not {deadline_s!r}")
        self.expired = 0
        """Jobs that were stopped at their deadline."""
        self._deadline_s = deadline_s
        self._jobs: dict[J, BlockTransfer] = {}

    def begin(self, job: J, blocks: int, submit: Callable[[], BlockTransfer]) -> None:
        """Begin a job of so many blocks; one that the store refuses has failed."""
        try:
            self._jobs[job] = submit()
        except NearflashError:
            refused = BlockTransfer(blocks)
            refused.stop()
            self._jobs[job] = refused

    def take_finished(self) -> Iterator[tuple[J, BlockTransfer]]:
        """Jobs that have ended, or are stopped now as their time is over."""
        now = time.monotonic()
        for job, transfer in list(self._jobs.items()):
            if not transfer.is_done() and now - transfer.start_s > self._deadline_s:
                transfer.stop()
                self.expired += 1
            if transfer.is_done():
                del self._jobs[job]
                yield job, transfer

    def drain(self) -> None:
        """Wait for all jobs, none longer than its deadline: no memory of theirs is used any more."""
        for transfer in self._jobs.values():
            try:
                transfer.result(max(transfer.start_s + self._deadline_s - time.monotonic(), 0.0))
            except TimeoutError:
                transfer.stop()
                self.expired += 1
