"""Dense tensors of a checkpoint by name, expanded when they are asked for, and the next ones before that.

What accelerate's hooks take as `weights_map` (AlignDevicesHook, dispatch_model).
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.device.threads import set_ieee_arithmetic
from nearflash.storage.io.direct import aligned_buffer
from nearflash.weights.expand import expand
from nearflash.weights.file import WeightsTensor

__all__ = ["TORCH_DTYPES", "KeptTensor", "WeightsMap"]

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Of the tensors of each dtype of a file."""
_READERS = 2
"""Tensors that are read and expanded at once: one is read while the one before it is expanded."""


class WeightsMap(Mapping[str, Tensor]):
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
        self._tensors = {name: KeptTensor(each) if name in set(in_memory) else each for name, each in tensors.items()}
        self._next = dict(zip(self._tensors, [*list(self._tensors)[1:], *list(self._tensors)[:1]], strict=True))
        self._device, self._prefetch_bytes = device, prefetch_bytes
        self._pool = ThreadPoolExecutor(_READERS, "nearflash-weights", initializer=set_ieee_arithmetic)
        self._ahead: OrderedDict[str, Future[Tensor]] = OrderedDict()
        self._buffers, self._lock, self._last = _Buffers(), threading.Lock(), ""

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._tensors:
                raise KeyError(name)
            if self._last:
                self._next[self._last] = name
            self._last = name
            if name not in self._ahead:
                self._drop()
            job = self._ahead.pop(name, None) or self._pool.submit(self._expand, name)
            self._fill(name)
        return job.result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Wait for what is being expanded and end the threads; may be called twice."""
        with self._lock:
            self._drop()
        self._pool.shutdown()

    def __enter__(self) -> "WeightsMap":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, name: str) -> None:
        """Begin what comes after `name`, as much as there is room for."""
        room = self._prefetch_bytes - sum(self._tensors[each].dense_bytes for each in self._ahead)
        for _ in range(len(self._tensors)):
            name = self._next[name]
            if name == self._last:
                return
            if name not in self._ahead:
                room -= self._tensors[name].dense_bytes
                if room < 0:
                    return
                self._ahead[name] = self._pool.submit(self._expand, name)

    def _drop(self) -> None:
        """Forget what was begun: another order than the one known is asked for."""
        for job in self._ahead.values():
            job.cancel()
        self._ahead.clear()

    def _expand(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in TORCH_DTYPES:
            raise tensor.error(f"its dtype must be one of {', '.join(TORCH_DTYPES)}, not {tensor.dtype}")
        if self._device != "cpu":
            found: Tensor = expand(tensor, self._device)
            return found
        out = torch.from_numpy(self._buffers.take(tensor.dense_bytes))
        return expand(tensor, out=out.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape))


class KeptTensor(WeightsTensor):
    """A tensor whose stored bytes are in memory: `data`, or what reading it gives now."""

    def __init__(self, tensor: WeightsTensor, data: NDArray[np.uint8] | None = None) -> None:
        super().__init__(**vars(replace(tensor)))
        object.__setattr__(self, "_data", tensor.read() if data is None else data)

    def read(self) -> NDArray[np.uint8]:
        """The bytes in memory."""
        data: NDArray[np.uint8] = vars(self)["_data"]
        return data


class _Buffers:
    """Memory of dense tensors, used again when no tensor refers to it any more: it has its pages then."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """Bytes with any content."""
        free = self._free.setdefault(size_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = aligned_buffer(size_bytes)
        # Views of an array refer to what its memory belongs to: behind a memoryview to this array, not further.
        array: NDArray[np.uint8] = np.frombuffer(memoryview(memory.data), np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return array
