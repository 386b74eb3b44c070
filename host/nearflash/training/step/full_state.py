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
from nearflash.training.step.members import Member
from nearflash.training.step.parameters import FlatParameters
from nearflash.training.step.requirements import is_readable
from nearflash.training.step.streamed import find_values
from nearflash.training.step.transfer import HOST_ARRAYS

__all__ = ["MASTER", "by_place", "check_full_state", "full_state", "load_full_state"]

MASTER = "master"
"""Key of the fp32 parameters of tensors that have another dtype."""
_SQUARES = ("exp_avg_sq", "sum")
"""torch's names of sums of squares."""
_FORMATS = {state_format.element_bytes: state_format for state_format in StateFormat}


def full_state(flat: FlatParameters, store: StateStore) -> dict[int, dict[str, Any]]:
    """State by torch's number of the tensor, as torch.optim's: `step`, and each array under torch's name, fp32, of the
    tensor's shape.

    Tensors that were never updated have none; those that are not fp32 have their `master` beside it. Narrow state
    formats are decoded. Raises StateError for damaged data.
    """
    values = {array.torch_name or MASTER: _read(store, array) for array in _arrays(store.manifest.arrays)}
    state: dict[int, dict[str, Any]] = {}
    for member, entry, steps in zip(flat.members, store.manifest.tensors, store.tensor_steps, strict=True):
        if steps:
            inside = slice(entry.start, entry.start + entry.params)
            member_state = state[member.number] = {
                "step": torch.tensor(float(steps), dtype=torch.float32, device="cpu")
            }
            for name, flat_values in values.items():
                if name != MASTER or member.tensor.dtype != torch.float32:
                    member_state[name] = torch.from_numpy(flat_values[inside].copy()).view(entry.shape)
    return state


def by_place(state_dict: Mapping[str, Any]) -> Any:
    """The state of a dict by the tensors' places in its groups, which may name them otherwise, as torch reads it."""
    if not isinstance(given := state_dict["state"], Mapping):
        return given  # for `check_full_state`
    places: dict[Any, int] = {}
    for index, name in enumerate(name for group in state_dict["param_groups"] for name in group["params"]):
        places.setdefault(name, index)
    return {places.get(name, name): state for name, state in given.items()}


def check_full_state(
    members: Sequence[Member], arrays: Sequence[StateArray], state: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise StateError, ShapeError for what `load_full_state` cannot load into tensors that have these arrays."""
    by_number, known = {member.number: member for member in members}, {"step", MASTER}
    known |= {array.torch_name for array in _arrays(arrays)}
    if not isinstance(state, Mapping):
        raise StateError(f"state must be a dict by tensor, as full_state_dict gives it, not {type(state).__name__}")
    for number, given in state.items():
        if not isinstance(given, Mapping):
            raise StateError(f"state of {number!r} must be a dict, as full_state_dict gives it, not {given!r}")
        unknown = {name for name in given if name not in known and given[name] is not None}
        if number not in by_number or unknown:
            raise StateError(
                f"state must be of {len(members)} tensors of this optimizer, not {sorted(map(str, unknown))} of "
                f"{number!r}"
            )
        member = by_number[number]
        _updates(member.name, given)
        for name in known.difference({"step"}).intersection(given):
            if given[name] is not None:
                _check_values(name, member, given[name])


def _check_values(name: str, member: Member, values: Any) -> None:
    if not isinstance(values, torch.Tensor) or not is_readable(values) or not values.dtype.is_floating_point:
        raise StateError(
            f"{name} of {member.name!r} must be a dense floating-point tensor, not {type(values).__name__}: pass the "
            "state of an optimizer whose tensors are in memory"
        )
    if values.shape != member.tensor.shape:
        raise ShapeError(
            f"{name} of {member.name!r} must have the shape {tuple(member.tensor.shape)}, not {tuple(values.shape)}"
        )
    tensor = values.detach().float()
    if not bool(torch.isfinite(tensor).all()) or (name in _SQUARES and bool((tensor < 0).any())):
        least = " and at least 0" if name in _SQUARES else ""
        raise StateError(
            f"{name} of {member.name!r} must be finite{least}, in fp32, in every element: load the state of a step "
            "before it became otherwise"
        )


def load_full_state(flat: FlatParameters, store: StateStore, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Make `state`, which was checked, and the tensors' present values (or their `master`) the store's next step.

    What a tensor lacks is zero, and so is what compression had left out. fp32 and bf16 state comes back as `full_state`
    gave it, mx8 rounded once more. A tensor with a momentum and no `step`, as torch's SGD has it, had its first update.
    Raises StorageFullError, StateError; the store then stays at its step.
    """
    states = [state.get(member.number, {}) for member in flat.members]
    steps = [_updates(member.name, given) for member, given in zip(flat.members, states, strict=True)]
    try:
        for array in store.manifest.arrays:
            if array.name in HOST_ARRAYS:
                for extent in store.manifest.extents:
                    store.write(array.name, extent, aligned_buffer(array.extent_bytes(extent)))
        for array in _arrays(store.manifest.arrays):
            values = _gather(flat, store, states, array)
            for extent in store.manifest.extents:
                _write(store, array, extent, values[extent.start : extent.stop], max(steps, default=0))
        store.commit(steps)
    except BaseException:
        store.discard()
        raise


def _updates(name: str, given: Mapping[str, Any]) -> int:
    """How many updates a tensor has had. Raises StateError."""
    if (step := given.get("step")) is not None:
        try:
            count = float(step)
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"step of {name!r} must be a number of updates, not {step!r}") from error
        if not 0 <= count < 2**53 or count != int(count):
            raise StateError(f"step of {name!r} must be a number of updates, not {step!r}")
        return int(count)
    held = [key for key, value in given.items() if value is not None and key != MASTER]
    if any(key != "momentum_buffer" for key in held):
        raise StateError(f"state of {name!r} must have a step beside {', '.join(held)}: its next update depends on it")
    return len(held)


def _arrays(stored: Sequence[StateArray]) -> list[StateArray]:
    """Without scales."""
    return [array for array in stored if array.name == "p" or array.torch_name]


def _gather(
    flat: FlatParameters, store: StateStore, state: Sequence[Mapping[str, Any]], array: StateArray
) -> NDArray[np.float32]:
    values = np.zeros(store.manifest.params, np.float32)
    for entry, tensor, entry_state in zip(store.manifest.tensors, flat.tensors, state, strict=True):
        given = entry_state.get(array.torch_name or MASTER)
        given = find_values(tensor) if given is None and array.name == "p" else given
        if given is not None:
            values[entry.start : entry.start + entry.params] = given.detach().float().cpu().reshape(-1).numpy()
    return values


def _read(store: StateStore, array: StateArray) -> NDArray[np.float32]:
    parts = [store.read_array(name) for name in _list_stored(store, array)]
    values = np.empty(len(parts[0]), np.float32)
    return VectorState(array.name, _FORMATS[array.element_bytes], step=0).decode(parts, values)


def _write(store: StateStore, array: StateArray, extent: Extent, values: NDArray[np.float32], step: int) -> None:
    names = _list_stored(store, array)
    memories, words = [], []
    for stored in map(store.manifest.array, names):
        memories.append(aligned_buffer(stored.extent_bytes(extent)))
        used = memories[-1][: stored.size_bytes(extent.params)]
        words.append(used.view(np.float32 if stored.element_bytes == FP32.bytes else f"u{stored.element_bytes}"))
    VectorState(array.name, _FORMATS[array.element_bytes], step).encode(values, extent.start, words)
    for name, memory in zip(names, memories, strict=True):
        store.write(name, extent, memory)


def _list_stored(store: StateStore, array: StateArray) -> Sequence[str]:
    scale = f"{array.name}_scale"
    return (array.name, scale) if any(stored.name == scale for stored in store.manifest.arrays) else (array.name,)
