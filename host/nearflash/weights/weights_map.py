"""Dense tensors of a checkpoint by name, expanded when they are asked for, and the next ones before that.

What accelerate's hooks take as `weights_map` (AlignDevicesHook, dispatch_model).
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import aligned_buffer
from nearflash.support.closing import Closing
from nearflash.support.prefetch import Prefetcher
from nearflash.support.threads import CallingThread
from nearflash.weights.expand import expand
from nearflash.weights.file import WeightsTensor

__all__ = ["TORCH_DTYPES", "KeptTensor", "WeightsMap", "buffer_bytes"]

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Of the tensors of each dtype of a file."""
_JOBS = 6
"""Tensors at work at once, being read, read, or being expanded."""
_READING = 2
"""Of them, those that are being read: the disk has always a further request then, and none waits behind many."""


class WeightsMap(Closing, Mapping[str, Tensor]):
    """Tensors, each expanded anew when it is asked for. Close it, or use it as a context manager.

    tensors: in the order in which a forward pass uses them; where one uses another order, the map learns it.
    prefetch_bytes: dense tensors that are expanded before they are asked for; 0: none.
    in_memory: names of tensors whose stored bytes are read once, here, and kept.
    device: of the tensors, `cpu` or `cuda`. Asking for a tensor raises WeightsError where it is damaged.
    """

    def __init__(
        self,
        tensors: Mapping[str, WeightsTensor],
        prefetch_bytes: int = 256 << 20,
        in_memory: Iterable[str] = (),
        device: str = "cpu",
    ) -> None:
        kept = set(in_memory)
        self._tensors = {name: KeptTensor(tensor) if name in kept else tensor for name, tensor in tensors.items()}
        self._next = dict(pairwise(self._tensors))  # of the last one, when it is known whether another pass comes
        self._device, self._prefetch_bytes = device, prefetch_bytes
        self._loads = Prefetcher("nearflash-weights", self._expand, threads=_JOBS)
        self._buffers = _Buffers(buffer_bytes(tensors.values(), prefetch_bytes))
        self._reading, self._expanding = threading.Semaphore(_READING), threading.Semaphore(os.cpu_count() or 1)
        self._lock, self._last = threading.Lock(), ""

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._tensors:
                raise KeyError(name)
            if self._last:
                self._next[self._last] = name
            self._last = name
            if name not in self._loads:
                self._loads.drop()  # of another order: beside what begins now it would be more than buffer_bytes
            job = self._loads.pop(name)
            self._fill(name)
        return job.result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Wait for what is being expanded and end the threads; may be called twice."""
        self._loads.close()

    def _fill(self, name: str) -> None:
        """Begin what comes after `name`, as much as there is room for."""
        room = self._prefetch_bytes - sum(self._tensors[each].dense_bytes for each in self._loads)
        for _ in range(len(self._tensors)):
            name = self._next.get(name, "")
            if name in ("", self._last):
                return
            if name not in self._loads:
                room -= self._tensors[name].dense_bytes
                if room < 0:
                    return
                self._loads.begin(name)

    def _expand(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in TORCH_DTYPES:
            raise tensor.error(f"its dtype must be one of {', '.join(TORCH_DTYPES)}, not {tensor.dtype}")
        take = self._buffers.take
        if not tensor.is_expanded_by_host:
            with self._expanding:
                made = torch.from_numpy(take(tensor.dense_bytes))[: tensor.dense_bytes]
                out = expand(tensor, out=made.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape))
            return out if self._device == "cpu" else out.to(self._device)
        in_memory = isinstance(tensor, KeptTensor)
        with nullcontext() if in_memory else self._reading:  # what is in memory does not wait for the disk
            data = tensor.load(take)
        with self._expanding:
            tensor.check(data)
            read = KeptTensor(tensor, data)
            if self._device != "cpu":
                expanded: Tensor = expand(read, self._device)
                return expanded
            dtype = TORCH_DTYPES[tensor.dtype]
            if tensor.form == "dense" and not in_memory and tensor.offset % dtype.itemsize == 0:
                return torch.from_numpy(data).view(dtype).view(tensor.shape)  # where it was read
            out = torch.from_numpy(take(tensor.dense_bytes))[: tensor.dense_bytes].view(dtype).view(tensor.shape)
            return expand(read, out=out, executor=CallingThread())


class KeptTensor(WeightsTensor):
    """A tensor whose stored bytes are in memory: `data`, or what reading it gives now."""

    def __init__(self, tensor: WeightsTensor, data: NDArray[np.uint8] | None = None) -> None:
        stated = {field.name: getattr(tensor, field.name) for field in fields(WeightsTensor)}
        super().__init__(**stated | {"expander": None})  # the host has its bytes
        object.__setattr__(self, "_data", tensor.read(aligned_buffer) if data is None else data)

    def read(self, memory: Callable[[int], NDArray[np.uint8]] = aligned_buffer) -> NDArray[np.uint8]:
        """The bytes in memory."""
        data: NDArray[np.uint8] = vars(self)["_data"]
        return data

    def load(self, memory: Callable[[int], NDArray[np.uint8]] = aligned_buffer) -> NDArray[np.uint8]:
        """The bytes in memory."""
        return self.read()

    def check(self, data: NDArray[np.uint8]) -> None:
        """Nothing: they were checked."""


def buffer_bytes(tensors: Iterable[WeightsTensor], prefetch_bytes: int) -> int:
    """Bytes of memory that a map of tensors keeps for reading and for dense tensors, however many passes there are.

    Tensors come in a few sizes, each with memory of its own that waits for its turn: hence twice what is expanded
    beforehand.
    """
    listed = list(tensors)
    dense, stored = (
        max((getattr(tensor, name) for tensor in listed), default=0) for name in ("dense_bytes", "stored_bytes")
    )
    return 2 * prefetch_bytes + dense + _JOBS * (stored + stored // 8)


class _Buffers:
    """Memory of tensors, used again when no tensor refers to it any more: it has its pages then.

    What waits for that is given back where all would be more than `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._size_bytes, self._lock = limit_bytes, 0, threading.Lock()
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """Bytes with any content, so many or an eighth more: compressed tensors differ a little in size."""
        step = max(1 << max(size_bytes.bit_length() - 4, 0), BLOCK_BYTES)
        buffer_bytes = max(-(-size_bytes // step), 1) * step
        with self._lock:
            free = self._free.setdefault(buffer_bytes, deque())
            memory = free.pop() if free else None
            more = buffer_bytes if memory is None else 0
            self._give_back(more)
            self._size_bytes += more
        if memory is None:
            memory = self._new(buffer_bytes)
        # Views of an array refer to what its memory belongs to: behind a memoryview to this array, not further.
        array: NDArray[np.uint8] = np.frombuffer(memoryview(memory.data), np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False  # without the lock: a collection may hold it
        return array

    def _new(self, room: int) -> NDArray[np.uint8]:
        try:
            return aligned_buffer(room)
        except BaseException:
            with self._lock:
                self._size_bytes -= room
            raise

    def _give_back(self, more: int) -> None:
        """Give back what is free, as far as all and so many bytes more would be beyond the limit."""
        for size, free in self._free.items():
            while self._size_bytes + more > self._limit_bytes and free:
                free.pop()
                self._size_bytes -= size
