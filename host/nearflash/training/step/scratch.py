"""Gradients that leave memory as backward completes them: a file beside the state, and the sums of their squares.

    backward ──p.grad──► hook: sum of squares, write, p.grad = None        step: norm, clip ──► extents: read, update

A step knows the norm before it updates anything, so clipping is exact: the factor is applied when gradients are read. A
second gradient of a tensor (accumulation, a second backward) is added to the first in the gradient's dtype, as torch
does. The file has no name and goes with the process; after a step, or `zero_grad`, what it holds does not count.
"""

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.training.step.norm import square_runs
from nearflash.training.step.requirements import is_readable
from nearflash.training.step.traffic import Traffic
from nearflash.training.step.worker import Worker

__all__ = ["GradientScratch"]

CHUNK_BYTES = 4 << 20


class GradientScratch:
    """Room for the gradients of `tensors`, in their dtypes. Raises StorageFullError, with nothing left behind."""

    def __init__(self, tensors: Sequence[torch.Tensor], path: Path, traffic: Traffic, *, direct: bool) -> None:
        """path: of the state."""
        self._traffic = traffic
        self._error: Exception | None = None
        self._offsets: dict[int, int] = {}
        size_bytes = 0
        for tensor in tensors:
            self._offsets[id(tensor)] = size_bytes
            size_bytes += -(-tensor.numel() * tensor.element_size() // BLOCK_BYTES) * BLOCK_BYTES
        self._held: dict[int, list[NDArray[np.float64]]] = {}
        """Sums of the squares of the gradients that are in the file, by tensor."""
        self._hooks: dict[int, RemovableHandle] = {}
        path = path.with_name(f"{path.name}.gradients")
        try:
            self._file = DirectFile.create(path, max(size_bytes, BLOCK_BYTES), direct=direct)
        except StorageFullError as error:
            raise StorageFullError(
                f"free_gradients must have room for {size_bytes} bytes of gradients beside the state: free it, or "
                f"leave the option out ({error})"
            ) from error
        path.unlink()

    def attach(self, tensors: Sequence[torch.Tensor], worker: Worker) -> None:
        """Have the gradients of these tensors written when they are complete; of those that want one by now.

        worker: writes them, so that an interrupt cuts nothing in two.
        """
        me = weakref.ref(self)  # hooks live as long as their tensors

        def arrive(tensor: torch.Tensor) -> None:
            if (scratch := me()) is not None:
                worker(lambda: scratch._put(tensor))

        for tensor in tensors:
            if tensor.requires_grad and id(tensor) in self._offsets and id(tensor) not in self._hooks:
                self._hooks[id(tensor)] = tensor.register_post_accumulate_grad_hook(arrive)

    def close(self) -> None:
        """Leave gradients where they are from here on, and give the room back."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._held.clear()
        self._file.close()

    def clear(self) -> None:
        """Forget all gradients."""
        self._held.clear()
        self._error = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's gradient is here, and not in its `grad`, which goes before it."""
        return tensor.grad is None and id(tensor) in self._held

    def squares(self, tensors: Sequence[torch.Tensor]) -> list[NDArray[np.float64]]:
        """Sums of the squares, of each 1,024 elements, of those of these tensors whose gradients are here.

        Raises StateError where one could not be written.
        """
        if self._error is not None:
            raise StateError(
                f"gradients must be complete, but one could not be written beside the state ({self._error}): call "
                "zero_grad and run backward again"
            ) from self._error
        return [part for tensor in tensors if self.holds(tensor) for part in self._held[id(tensor)]]

    def read(self, tensor: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """Elements [first, first + length) of a tensor's gradient, (length,), in host memory. Raises StateError."""
        size = tensor.element_size()
        start, stop = first * size, (first + length) * size
        begin, end = start // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES
        memory = reuse_buffer(end - begin)
        self._file.read(self._offsets[id(tensor)] + begin, memory)
        self._traffic.add(flash_read_bytes=memory.nbytes)
        return torch.from_numpy(memory[start - begin : stop - begin]).view(tensor.dtype)

    def pieces(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        """First elements and lengths by which a gradient is written and read."""
        step = CHUNK_BYTES // tensor.element_size()
        return ((first, min(step, tensor.numel() - first)) for first in range(0, tensor.numel(), step))

    def _put(self, tensor: torch.Tensor) -> None:
        """Nothing happens to a gradient that the step will refuse."""
        gradient = tensor.grad
        if gradient is None or not is_readable(gradient) or gradient.dtype is not tensor.dtype:
            return
        set_ieee_arithmetic()
        try:
            self._write(tensor, gradient.detach().reshape(-1))
        except Exception as error:
            self._error = error
            raise
        tensor.grad = None

    def _write(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        earlier = id(tensor) in self._held
        sums: list[NDArray[np.float64]] = []
        for first, length in self.pieces(tensor):
            part = flat[first : first + length].cpu()
            if earlier:
                part = part + self.read(tensor, first, length)
            sums += square_runs(part)
            size_bytes = length * tensor.element_size()
            memory = reuse_buffer(-(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            torch.from_numpy(memory[:size_bytes]).view(tensor.dtype).copy_(part)
            self._file.write(self._offsets[id(tensor)] + first * tensor.element_size(), memory)
            self._traffic.add(flash_written_bytes=memory.nbytes)
        self._held[id(tensor)] = sums
