"""The state files of several ranks, each with shards of the tensors, for another number of ranks.

A shard's name in a manifest says what it is of the whole tensor: `weight[17:34,0:40] of 50x40`; a name without that is
of a whole tensor. So the shards of any ranks can be filled from those of any others, to the bit.

Limits: arrays of one element a parameter, so moments of fp32 or bf16; those of mx8 share scales across shards.
"""

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import FormatError, StateError
from nearflash.storage.state.carry import TensorReader
from nearflash.storage.state.manifest import Extent, Manifest, StateArray, TensorEntry
from nearflash.storage.state.snapshot import fill_folder
from nearflash.storage.state.state_store import StateStore
from nearflash.storage.state.stripe import Stripe

__all__ = ["RANKS_KEY", "Shard", "ShardedState", "reshard_offline"]

RANKS_KEY = "nearflash_ranks"
"""In the metadata of a rank's store: `{"run": …, "rank": …, "of": …}`."""
_NAME = re.compile(r"(.*)\[([0-9:,]+)\] of ([0-9x]+)", re.DOTALL)


@dataclass(frozen=True)
class Shard:
    """Elements [first, stop) in each dimension of the tensor `name`, which has the shape `full_shape`."""

    name: str
    first: tuple[int, ...]
    stop: tuple[int, ...]
    full_shape: tuple[int, ...]

    def __str__(self) -> str:
        """Its name in a manifest."""
        ranges = ",".join(f"{first}:{stop}" for first, stop in zip(self.first, self.stop, strict=True))
        return f"{self.name}[{ranges}] of {'x'.join(map(str, self.full_shape))}"

    @classmethod
    def of(cls, entry: TensorEntry) -> "Shard":
        """The shard that an entry of a manifest names."""
        if (match := _NAME.fullmatch(entry.name)) is None:
            return cls(entry.name, (0,) * len(entry.shape), entry.shape, entry.shape)
        bounds = [tuple(map(int, bound.split(":"))) for bound in match[2].split(",")]
        whole = tuple(map(int, match[3].split("x")))
        return cls(match[1], tuple(first for first, _ in bounds), tuple(stop for _, stop in bounds), whole)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own."""
        return tuple(stop - first for first, stop in zip(self.first, self.stop, strict=True))

    def within(self, other: "Shard") -> tuple[slice, ...]:
        """Cut out what another shard has of this one, as a part of the other; empty where that is nothing."""
        return tuple(
            slice(max(a, c) - c, max(max(a, c), min(b, d)) - c)
            for a, b, c, d in zip(self.first, self.stop, other.first, other.stop, strict=True)
        )


class ShardedState:
    """The open stores of all ranks of a run, at one step. Raises StateError where they are not of one run and whole."""

    def __init__(self, stores: Sequence[StateStore]) -> None:
        shares = [store.metadata.get(RANKS_KEY) for store in stores]
        said = {(share["run"], share["of"]) for share in shares if share}
        ranks = sorted(share["rank"] for share in shares if share)
        if len(said) != 1 or ranks != list(range(len(stores))) or {of for _, of in said} != {len(stores)}:
            files = ", ".join(str(store.paths[0]) for store in stores)
            raise StateError(
                f"state files must be those of all ranks of one run, not ranks {ranks} of (run, ranks) {sorted(said)} "
                f"({files}): give one of each rank"
            )
        self.stores = stores
        steps = [store.steps for store in stores]
        if max(steps) - min(steps) > 1:
            raise StateError(f"ranks must be at the same step, or one apart, not at {steps}; give files of one run")
        for store in stores:
            if store.steps > min(steps):
                store.rollback()
        self._shards = {(store, entry.name): Shard.of(entry) for store in stores for entry in store.manifest.tensors}

    @classmethod
    @contextlib.contextmanager
    def open(cls, files: Iterable[Path], *, direct: bool = True) -> Iterator["ShardedState"]:
        """The files, one of each rank, in any order. Raises StateError."""
        with contextlib.ExitStack() as life:
            yield cls([life.enter_context(StateStore.open(path, direct=direct)) for path in files])

    @cached_property
    def tensors(self) -> dict[str, tuple[Shard, str]]:
        """A shard and the dtype of each tensor, by name, in order."""
        found: dict[str, tuple[Shard, str]] = {}
        for store in self.stores:
            for entry in store.manifest.tensors:
                shard = self._shards[store, entry.name]
                found.setdefault(shard.name, (shard, entry.dtype))
        return found

    def split_dimension(self, name: str) -> int | None:
        """The dimension in which the ranks have divided a tensor; None: each has all of it."""
        mine = [shard for shard in self._shards.values() if shard.name == name]
        return next(
            (dim for dim, size in enumerate(mine[0].full_shape) if any(one.shape[dim] != size for one in mine)), None
        )

    def write(self, path: Path, entries: Sequence[tuple[str, tuple[int, ...], str]], rank: int, of: int) -> None:
        """A new file for one of `of` ranks, with these (name, shape, dtype). Raises StateError, FormatError."""
        first = self.stores[0]
        for array in first.manifest.arrays:
            if array.params_per_element != 1:
                raise FormatError(
                    f"moments must be fp32 or bf16 to be resharded, but {array.name} has an element for "
                    f"{array.params_per_element} parameters: resume on {len(self.stores)} ranks, and hand "
                    "full_state_dict() to load_full_state_dict()"
                )
        manifest = Manifest.pack(entries, first.manifest.extent_params, first.manifest.arrays, first.manifest.master)
        held: dict[str, tuple[str, NDArray[np.uint8]]] = {}

        def fill(name: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
            array = manifest.array(name)
            for entry in manifest.tensors:
                at, stop = max(entry.start, extent.start), min(entry.start + entry.params, extent.stop)
                if at < stop:
                    if held.get(name, ("",))[0] != entry.name:
                        held[name] = entry.name, self._gather(array, entry)
                    size = array.element_bytes
                    part = held[name][1][(at - entry.start) * size : (stop - entry.start) * size]
                    memory[(at - extent.start) * size : (stop - extent.start) * size] = part

        share = {**first.metadata[RANKS_KEY], "rank": rank, "of": of}
        stamp = replace(first.stamp, identity=secrets.token_hex(8), commit=secrets.token_hex(8))
        steps = [self._updates(Shard.of(entry).name) for entry in manifest.tensors]
        metadata: dict[str, Any] = {**first.metadata, RANKS_KEY: share}
        StateStore.build([path], manifest, fill, Stripe.among(1, None), stamp, steps, metadata, direct=False).close()

    def _updates(self, name: str) -> int:
        return max(
            updates
            for store in self.stores
            for entry, updates in zip(store.manifest.tensors, store.tensor_steps, strict=True)
            if self._shards[store, entry.name].name == name
        )

    def _gather(self, array: StateArray, target: TensorEntry) -> NDArray[np.uint8]:
        """The bytes of a new shard, from all that have a part. Raises StateError where a part is nowhere."""
        wanted, size = Shard.of(target), array.element_bytes
        values, known = np.zeros((*wanted.shape, size), np.uint8), np.zeros(wanted.shape, bool)
        for store in self.stores:
            for entry in store.manifest.tensors:
                shard = self._shards[store, entry.name]
                if shard.name != wanted.name or shard.full_shape != wanted.full_shape:
                    continue
                inside, part = shard.within(wanted), wanted.within(shard)
                if known[inside].size and not known[inside].all():
                    memory = np.zeros((entry.stop - entry.start) * size, np.uint8)
                    whole = Extent(0, 0, entry.stop - entry.start)
                    TensorReader(store, array).put(entry, replace(entry, start=0), whole, memory)
                    values[inside] = memory[: prod(shard.shape) * size].reshape(*shard.shape, size)[part]
                    known[inside] = True
        if not known.all():
            raise StateError(f"{target.name} must be in the files of the ranks, but part of it is in none of them")
        return values.reshape(-1)


def reshard_offline(files: Sequence[Path], folder: Path, of: int, *, direct: bool = True) -> list[Path]:
    """New files `rank<r>.state` in a folder for `of` ranks, each tensor divided as FSDP2 does in the dimension in which
    it was; the given ones stay. Returns the new ones. Raises StateError, FormatError, StorageFullError."""
    if of < 1:
        raise StateError(f"ranks must be at least 1, not {of}")
    paths = [folder / f"rank{rank}.state" for rank in range(of)]
    if there := [path for path in paths if path.exists()]:
        raise StateError(f"{there[0]} must not exist yet; choose another folder")
    with fill_folder(folder), ShardedState.open(files, direct=direct) as state:
        try:
            for rank, path in enumerate(paths):
                state.write(path, [_shard_of(state, name, rank, of) for name in state.tensors], rank, of)
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise
    return paths


def _shard_of(state: ShardedState, name: str, rank: int, of: int) -> tuple[str, tuple[int, ...], str]:
    """(name, shape, dtype) of a rank's part."""
    shard, dtype = state.tensors[name]
    if (dim := state.split_dimension(name)) is None and not _was_split(state, name):
        return name, shard.full_shape, dtype
    dim = dim or 0
    share = -(-shard.full_shape[dim] // of)
    first, stop = (min(share * number, shard.full_shape[dim]) for number in (rank, rank + 1))
    bounds = [(0, size) for size in shard.full_shape]
    bounds[dim] = first, stop
    new = Shard(name, tuple(a for a, _ in bounds), tuple(b for _, b in bounds), shard.full_shape)
    return str(new), new.shape, dtype


def _was_split(state: ShardedState, name: str) -> bool:
    """Whether shards were made of it, be it one for one rank."""
    return all(entry.name != name for store in state.stores for entry in store.manifest.tensors)
