"""Transfers of an engine's jobs, each with a deadline after which it has failed, whatever the drive still does."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from nearflash.abi.errors import CommandError, NearflashError
from nearflash.storage.blocks.transfer import BlockTransfer

__all__ = ["TransferJobs"]

J = TypeVar("J", bound=Hashable)
_log = logging.getLogger(__name__)


class TransferJobs(Generic[J]):
    """Jobs under way. Any thread may call, and none waits but in `drain` and `run`, never longer than the deadline."""

    def __init__(self, deadline_s: float) -> None:
        if not deadline_s > 0:
            raise CommandError(f"deadline_s must be above 0, not {deadline_s!r}")
        self.expired = 0
        """Jobs that were stopped at their deadline."""
        self.deadline_s = deadline_s
        self._jobs: dict[J, BlockTransfer] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, job: J, blocks: int, submit: Callable[[], BlockTransfer]) -> BlockTransfer:
        """Begin a job of so many blocks; one that the store refuses has failed."""
        transfer = _submit(blocks, submit)
        with self._lock:
            self._jobs[job] = transfer
        return transfer

    def run(self, blocks: int, submit: Callable[[], BlockTransfer]) -> list[bool]:
        """Begin a job of so many blocks and wait for it; of each whether it succeeded in time."""
        transfer = _submit(blocks, submit)
        self._wait(transfer)
        return transfer.result()

    def take_finished(self) -> Iterator[tuple[J, BlockTransfer]]:
        """Jobs that have ended, or are stopped now as their time is over."""
        now = time.monotonic()
        with self._lock:
            jobs = list(self._jobs.items())
        for job, transfer in jobs:
            if not transfer.is_done() and now - transfer.start_s > self.deadline_s:
                self._stop(transfer)
            if transfer.is_done():
                with self._lock:
                    taken = self._jobs.pop(job, None)
                if taken:
                    yield job, transfer

    def drain(self) -> None:
        """Wait for all jobs, none longer than its deadline: no memory of theirs is used any more."""
        with self._lock:
            transfers = list(self._jobs.values())
        for transfer in transfers:
            self._wait(transfer)

    def _wait(self, transfer: BlockTransfer) -> None:
        try:
            transfer.result(max(transfer.start_s + self.deadline_s - time.monotonic(), 0.0))
        except TimeoutError:
            self._stop(transfer)

    def _stop(self, transfer: BlockTransfer) -> None:
        transfer.stop()
        with self._lock:
            self.expired += 1


def _submit(blocks: int, submit: Callable[[], BlockTransfer]) -> BlockTransfer:
    try:
        return submit()
    except NearflashError as error:
        _log.warning("%d blocks are refused: %s", blocks, error)
        refused = BlockTransfer(blocks)
        refused.stop()
        return refused
