"""A state's tensors in another layout: what a new state of more tensors, or in another order, is filled with."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.io.direct import aligned_buffer
from nearflash.storage.state.assembly import Fill
from nearflash.storage.state.manifest import Extent, Manifest, StateArray, TensorEntry
from nearflash.storage.state.state_store import StateStore

__all__ = ["TensorReader", "carry_over"]


def carry_over(store: StateStore, manifest: Manifest, initial: Callable[[Extent, NDArray[np.float32]], None]) -> Fill:
    """Fills a state of `manifest` with what `store` has of each tensor (same name, shape and dtype) and array.

    initial: as of StateStore.create, for the parameters of tensors that the store does not have; what else it does not
    have is zero. Raises StateError for damage.
    """
    known = {(entry.name, entry.shape, entry.dtype): entry for entry in store.manifest.tensors}
    sources = [known.get((entry.name, entry.shape, entry.dtype)) for entry in manifest.tensors]
    stored = {array.name: array for array in store.manifest.arrays}
    readers = {array.name: TensorReader(store, stored[array.name]) for array in manifest.arrays
               if stored.get(array.name) == array}  # fmt: skip
    starts, stops = [entry.start for entry in manifest.tensors], [entry.stop for entry in manifest.tensors]

    def fill(array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        if array == "p":
            initial(extent, memory.view(np.float32))
        if array not in readers:
            return
        for index in range(bisect_right(stops, extent.start), bisect_left(starts, extent.stop)):
            if (source := sources[index]) is not None:
                readers[array].put(source, manifest.tensors[index], extent, memory)

    return fill


class TensorReader:
    """One stored array, by ranges of tensors; keeps the extent that it read last."""

    def __init__(self, store: StateStore, array: StateArray) -> None:
        self._store, self._array = store, array
        self._memory = aligned_buffer(array.extent_bytes(store.manifest.extents[0]))
        self._held = -1

    def put(self, source: TensorEntry, target: TensorEntry, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Copy the part of the tensor, with its padding, that lies in `extent` of the new layout, into `memory`."""
        array, shift = self._array, source.start - target.start
        at, stop = max(target.start, extent.start), min(target.stop, extent.stop)
        while at < stop:
            held = self._extent_at(at + shift)
            last = min(stop, held.stop - shift)
            first = array.size_bytes(at + shift - held.start)
            size_bytes = array.size_bytes(last - at)
            offset = array.size_bytes(at - extent.start)
            memory[offset : offset + size_bytes] = self._memory[first : first + size_bytes]
            at = last

    def _extent_at(self, position: int) -> Extent:
        manifest = self._store.manifest
        extent = manifest.extents[position // manifest.extent_params]
        if extent.index != self._held:
            self._held = -1
            self._store.read(self._array.name, extent, self._memory[: self._array.extent_bytes(extent)])
            self._held = extent.index
        return extent
