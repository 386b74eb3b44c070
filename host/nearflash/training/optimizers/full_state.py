"""The stored state as torch.optim has it, in memory: for export, and for resuming from another optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import ShapeError, StateError
from nearflash.abi.formats import FP32
from nearflash.abi.optimizers import StateFormat
from nearflash.device.backends.host.vector.state import VectorState
from nearflash.storage import Extent, StateArray, StateStore, aligned_buffer
from nearflash.training.step.parameters import FlatParameters
from nearflash.training.step.transfer import HOST_ARRAYS

__all__ = ["MASTER", "full_state", "load_full_state"]

MASTER = "master"
"""Key of the fp32 parameters of tensors that have another dtype."""
_FORMATS = {state_format.element_bytes: state_format for state_format in StateFormat}


def full_state(flat: FlatParameters, store: StateStore) -> dict[int, dict[str, Any]]:
    """State by tensor, as torch.optim's: `step`, and each array under torch's name, fp32, of the tensor's shape.

    Tensors that were never updated have none; those that are not fp32 have their `master` beside it. Narrow state
    formats are decoded. Raises StateError for damaged data.
    """
    values = {array.torch_name or MASTER: _read(store, array) for array in _arrays(store)}
    state: dict[int, dict[str, Any]] = {}
    for index, (entry, steps) in enumerate(zip(store.manifest.tensors, store.tensor_steps, strict=True)):
        if steps:
            inside = slice(entry.start, entry.start + entry.params)
            state[index] = {"step": torch.tensor(float(steps))}
            for name, flat_values in values.items():
                if name != MASTER or flat.tensors[index].dtype != torch.float32:
                    state[index][name] = torch.from_numpy(flat_values[inside].copy()).view(entry.shape)
    return state


def load_full_state(flat: FlatParameters, store: StateStore, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Make `state` and the tensors' present values (or their `master`) the store's next step.

    What a tensor lacks is zero, and so is what compression had left out. fp32 and bf16 state comes back as `full_state`
    gave it, mx8 rounded once more. A tensor with a momentum and no `step`, as torch's SGD has it, had its first update.
    Raises StateError, ShapeError for what does not fit; the store then stays at its step.
    """
    entries = store.manifest.tensors
    for index, given in state.items():
        unknown = set(given) - {"step", MASTER} - {array.torch_name for array in _arrays(store)}
        if index not in range(len(entries)) or any(given[name] is not None for name in unknown):
            raise StateError(
                f"state must be of {len(entries)} tensors of this optimizer, not {sorted(unknown)} of {index}"
            )
    steps = [_updates(entry.name, state.get(index, {})) for index, entry in enumerate(entries)]
    try:
        for array in store.manifest.arrays:
            if array.name in HOST_ARRAYS:
                for extent in store.manifest.extents:
                    store.write(array.name, extent, aligned_buffer(array.extent_bytes(extent)))
        for array in _arrays(store):
            values = _gathered(flat, store, state, array)
            for extent in store.manifest.extents:
                _write(store, array, extent, values[extent.start : extent.stop], max(steps))
        store.commit(steps)
    except BaseException:
        store.discard()
        raise


def _updates(name: str, given: Mapping[str, Any]) -> int:
    """How many updates a tensor has had."""
    if (step := given.get("step")) is not None:
        return int(float(step))
    held = [key for key, value in given.items() if value is not None and key != MASTER]
    if any(key != "momentum_buffer" for key in held):
        raise StateError(f"state of {name!r} must have a step beside {', '.join(held)}: its next update depends on it")
    return len(held)


def _arrays(store: StateStore) -> list[StateArray]:
    """Without scales."""
    return [array for array in store.manifest.arrays if array.name == "p" or array.torch_name]


def _gathered(
    flat: FlatParameters, store: StateStore, state: Mapping[int, Mapping[str, Any]], array: StateArray
) -> NDArray[np.float32]:
    values = np.zeros(store.manifest.params, np.float32)
    for index, (entry, tensor) in enumerate(zip(store.manifest.tensors, flat.tensors, strict=True)):
        given = state.get(index, {}).get(array.torch_name or MASTER)
        given = tensor.detach() if given is None and array.name == "p" else given
        if given is None:
            continue
        if tuple(given.shape) != entry.shape:
            raise ShapeError(
                f"{array.torch_name} of {entry.name!r} must have the shape {entry.shape}, not {tuple(given.shape)}"
            )
        values[entry.start : entry.start + entry.params] = given.float().cpu().reshape(-1).numpy()
    return values


def _read(store: StateStore, array: StateArray) -> NDArray[np.float32]:
    parts = [store.read_array(name) for name in _stored_names(store, array)]
    values = np.empty(len(parts[0]), np.float32)
    return VectorState(array.name, _FORMATS[array.element_bytes], step=0).decode(parts, values)


def _write(store: StateStore, array: StateArray, extent: Extent, values: NDArray[np.float32], step: int) -> None:
    names = _stored_names(store, array)
    memories, words = [], []
    for stored in map(store.manifest.array, names):
        memories.append(aligned_buffer(stored.extent_bytes(extent)))
        used = memories[-1][: stored.size_bytes(extent.params)]
        words.append(used.view(np.float32 if stored.element_bytes == FP32.bytes else f"u{stored.element_bytes}"))
    VectorState(array.name, _FORMATS[array.element_bytes], step).encode(values, extent.start, words)
    for name, memory in zip(names, memories, strict=True):
        store.write(name, extent, memory)


def _stored_names(store: StateStore, array: StateArray) -> Sequence[str]:
    scale = f"{array.name}_scale"
    return (array.name, scale) if any(one.name == scale for one in store.manifest.arrays) else (array.name,)
