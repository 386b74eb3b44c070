"""An L2 adapter of LMCache: objects on a drive of this machine, checked, bounded, kept over restarts.

Adapter {"type": "plugin", "module_path": "nearflash.serving.lmcache", "class_name": "NearflashAdapter",
"adapter_params": {"path": "/mnt/nvme/kv", "capacity_bytes": 500000000000, "block_bytes": 33554432}}.

A damaged object, a drive that fails, and a load of more than `deadline_s` seconds are misses: the engine computes the
tokens. Checked against the classes of lmcache 0.5.6; another interface is refused at the start.

Source: lmcache.v1.distributed.l2_adapters.base.
"""

import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from nearflash.abi.errors import CommandError
from nearflash.serving.interface import check_interface
from nearflash.serving.jobs import TransferJobs
from nearflash.serving.tier_store import TierSettings

__all__ = ["NearflashAdapter"]

_METHODS: dict[str, tuple[str, ...]] = {
    "get_store_event_fd": (),
    "get_lookup_and_lock_event_fd": (),
    "get_load_event_fd": (),
    "submit_store_task": ("keys", "objects"),
    "pop_completed_store_tasks": (),
    "submit_lookup_and_lock_task": ("keys", "group_layout_descs"),
    "query_lookup_and_lock_result": ("task_id",),
    "submit_unlock": ("keys",),
    "submit_load_task": ("keys", "objects"),
    "query_load_result": ("task_id",),
    "close": (),
}
_POLL_S = 0.001
"""Between two looks at transfers that are in flight."""


class NearflashAdapter(L2AdapterInterface):
    """See the module. Any thread may call; none but `close` waits for a drive.

    params: those of nearflash.serving.tier_store.TierSettings, and block_bytes, most that an object has. Model, rank,
    group, salt, shapes and dtypes are parts of an object's key. Locked objects are pinned: they are not evicted.
    Raises UnsupportedError for another LMCache, CommandError, StateError.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        check_interface(L2AdapterInterface, _METHODS, "LMCache")
        super().__init__()
        given = dict(params)
        block_bytes = given.pop("block_bytes", None)
        if type(block_bytes) is not int:
            raise CommandError(f"block_bytes must be the most bytes that an object has, not {block_bytes!r}")
        settings = TierSettings.read(given)
        self._store = settings.open(block_bytes, "lmcache", {"engine": "lmcache", "bytes": block_bytes})
        self._loads, self._stores = TransferJobs[int](settings.deadline_s), TransferJobs[int](settings.deadline_s)
        self._tasks, self._lock = itertools.count(), threading.Lock()
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._locked: dict[ObjectKey, list[bytes]] = {}
        """Keys of the blocks that are pinned for an object, once for each lock."""
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._changed, self._closing = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, name="nearflash-lmcache", daemon=True)
        self._watcher.start()

    def get_store_event_fd(self) -> int:
        """See LMCache's."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """See LMCache's."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """See LMCache's."""
        return int(self._load_event.fileno())

    # Tasks

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See LMCache's; a task of which one object is not stored has failed, and the others are there."""
        return self._begin(self._stores, self._store.submit_put, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """See LMCache's."""
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """See LMCache's; an object of a group without a layout is not found."""
        task, found = next(self._tasks), Bitmap(len(keys))
        for number, key in enumerate(keys):
            layout = group_layout_descs.get(key.object_group_id)
            block = None if layout is None else _block_key(key, layout.shapes, layout.dtypes)
            with self._lock:
                if block and self._store.pin([block])[0]:
                    self._locked.setdefault(key, []).append(block)
                    found.set(number)
        with self._lock:
            self._found[task] = found
        self._lookup_event.notify()
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """See LMCache's."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """See LMCache's; an object that is not locked is left as it is."""
        with self._lock:
            for key in keys:
                if blocks := self._locked.pop(key, []):
                    self._store.unpin([blocks.pop()])
                    self._locked |= {key: blocks} if blocks else {}

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See LMCache's."""
        return self._begin(self._loads, self._store.submit_get, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """See LMCache's."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    # State

    def get_usage(self) -> AdapterUsage:
        """See LMCache's; whole slots, of all salts together: the store evicts by itself."""
        stats, size = self._store.stats(), self._store.block_bytes
        return AdapterUsage(total_bytes_used=stats.blocks * size, total_capacity_bytes=stats.capacity_blocks * size)

    def report_status(self) -> dict[str, Any]:
        """See LMCache's: the store's counts."""
        stats = self._store.stats()
        expired = self._loads.expired + self._stores.expired
        return {"is_healthy": not stats.failed_drives, "type": "nearflash", "expired": expired, **asdict(stats)}

    def close(self) -> None:
        """See LMCache's: end what is in flight, no later than the deadline; it may be called twice."""
        if self._closing:
            return
        self._closing = True
        self._changed.set()
        self._watcher.join()
        self._store.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    # Parts

    def _begin(
        self, jobs: TransferJobs[int], submit: Any, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> int:
        task = next(self._tasks)
        blocks = [_block_key(key, one.get_shapes(), one.get_dtypes()) for key, one in zip(keys, objects, strict=True)]
        jobs.begin(task, len(keys), lambda: submit(blocks, [one.byte_array for one in objects]))
        self._changed.set()
        return task

    def _watch(self) -> None:
        """Report transfers that end, or are stopped at their deadline, until `close`."""
        while not self._closing or len(self._loads) or len(self._stores):
            self._changed.wait()
            self._changed.clear()
            while len(self._loads) or len(self._stores):
                self._report()
                time.sleep(_POLL_S)
            if self._closing:
                return

    def _report(self) -> None:
        for task, transfer in self._stores.take_finished():
            with self._lock:
                self._stored[task] = L2StoreResult(all(transfer.result()), transfer.size_bytes)
            self._store_event.notify()
        for task, transfer in self._loads.take_finished():
            results = transfer.result()
            loaded = Bitmap(len(results))
            for number in itertools.compress(itertools.count(), results):
                loaded.set(number)
            with self._lock:
                self._loaded[task] = loaded
            self._load_event.notify()


def _block_key(key: ObjectKey, shapes: Sequence[Any], dtypes: Sequence[Any]) -> bytes:
    """Hash all that must be equal for an object's bytes to be those that are asked for."""
    named = {name: value for name, value in asdict(key).items() if name != "chunk_hash"}
    layout = [[list(shape) for shape in shapes], [str(dtype) for dtype in dtypes]]
    return sha256(key.chunk_hash + b"\0" + json.dumps([named, layout], sort_keys=True).encode()).digest()
