"""The thread that stores what was put into a file: whatever waits goes in one batch, under one flush."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nearflash.storage.blocks.block_file import BlockFile
from nearflash.storage.blocks.segment_log import Put

__all__ = ["BlockWriter"]

_log = logging.getLogger(__name__)


class BlockWriter:
    """Any thread may `submit`; most_bytes: of blocks that wait or are being stored."""

    def __init__(self, file: BlockFile, most_bytes: int) -> None:
        self._file, self._most_bytes, self._bytes = file, most_bytes, 0
        self._waiting: deque[Put] = deque()
        self._storing: Counter[bytes] = Counter()
        """Keys of blocks that are being stored."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "block-writer")

    def submit(self, blocks: Sequence[Put]) -> None:
        """Have blocks stored; all are refused at once where too many bytes are in flight. Each is settled."""
        size = sum(len(data) for *_, data in blocks)
        with self._lock:
            accepted = not self._bytes or self._bytes + size <= self._most_bytes
            if accepted:
                self._bytes += size
                self._waiting += blocks
        if accepted:
            self._thread.submit(self._store)
        else:
            self._settle(blocks)

    def close(self) -> None:
        """Store what waits; it may be called twice."""
        self._thread.shutdown()
        self._file.drain()

    def _store(self) -> None:
        """Have what waits stored, a segment's worth at a time; it may be none: an earlier turn has taken it."""
        while blocks := self._take():
            self._store_batch(blocks)

    def _take(self) -> list[Put]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(self._file.layout.segment_slots, len(self._waiting)))]

    def _store_batch(self, blocks: Sequence[Put]) -> None:
        with self._lock:
            fresh = {key: (transfer, number, key, data) for transfer, number, key, data in reversed(blocks)
                     if key not in self._file.index and key not in self._storing}  # fmt: skip
            self._storing.update(key for *_, key, _ in blocks)
        try:
            stored = self._file.submit_write(list(reversed(fresh.values())))
        except Exception:  # whoever waits for them, or for those behind them, must not wait forever
            _log.exception("%d blocks are not stored", len(blocks))
            self._end(blocks)
            return
        stored.add_done_callback(lambda _: self._end(blocks))

    def _end(self, blocks: Sequence[Put]) -> None:
        with self._lock:
            self._bytes -= sum(len(data) for *_, data in blocks)
            self._storing -= Counter(key for *_, key, _ in blocks)
        self._settle(blocks)

    def _settle(self, blocks: Sequence[Put]) -> None:
        for transfer, number, key, data in blocks:
            stored = key in self._file.index
            if not stored:
                with self._file.lock:
                    self._file.counts.refused += 1
            transfer.settle(number, stored, len(data))
