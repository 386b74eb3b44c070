"""The masters of an optimizer's tensors: the store on flash, the devices beside it, and their schedule."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.errors import StateError
from nearflash.abi.optimizers import BLOCK_PARAMS, OptimizerStep, StateFormat
from nearflash.abi.topk import longest_stream_bytes
from nearflash.device import Device, open_device
from nearflash.storage import Extent, StateArray, StateStore, aligned_buffer
from nearflash.training.gradients.compression import Compressor, TopK
from nearflash.training.optimizers.settings import Settings
from nearflash.training.step.parameters import FlatParameters
from nearflash.training.step.schedule import Schedule
from nearflash.training.step.timeline import Timeline
from nearflash.training.step.traffic import Traffic
from nearflash.training.step.transfer import HOST_ARRAYS

__all__ = ["Master", "arrays_of"]


def arrays_of(rules: Sequence[OptimizerStep], compression: TopK | None) -> tuple[StateArray, ...]:
    """The arrays that must be stored so that every one of the rules finds its own: p first, the residual last."""
    arrays = {"p": StateArray("p")}
    for rule in rules:
        for role, torch_name in rule.torch_names.items():
            arrays[role] = StateArray(role, rule.state_format.element_bytes, 1, torch_name)
            if rule.state_format is StateFormat.MX8:
                arrays[f"{role}_scale"] = StateArray(f"{role}_scale", 1, BLOCK_PARAMS)
    if compression is not None and compression.feedback:
        arrays |= _RESIDUALS[compression.residual]
    return tuple(arrays.values())


_RESIDUALS = {
    "fp32": {"residual": StateArray("residual")},
    "int4": {"residual": StateArray("residual", 1, 2), "residual_scale": StateArray("residual_scale", 2, 16)},
}


class Master:
    """Opens devices, and creates or opens the store, whose parameters then are the tensors'.

    Raises StateError, StorageFullError, FormatError, and what `open_device` raises.
    """

    flat: FlatParameters
    store: StateStore
    schedule: Schedule
    compressor: Compressor | None

    def __init__(
        self, groups: Sequence[dict[str, Any]], arrays: Sequence[StateArray], settings: Settings, timeline: Timeline
    ) -> None:
        self.traffic, self._timeline, self._settings, self._arrays = Traffic(), timeline, settings, arrays
        self.paths = settings.paths
        self.flat = self._flatten(groups, settings.new_extent_params)
        exists = [path for path in self.paths if path.exists()]
        if exists and not settings.resume:
            raise StateError(f"{exists[0]} must not exist yet: pass resume=True to go on from it, or give another path")
        with contextlib.ExitStack() as life:
            devices = [self._open(device, life) for device in settings.devices]
            self._device_of = dict(zip(self.paths, devices, strict=True))
            if exists or settings.resume is True:
                self._resume(groups)
            else:
                self._create()
            life.callback(lambda: self.store.close())
            self.schedule = self._scheduled()
            life.callback(lambda: self.schedule.close())
            self._life = life.pop_all()

    @property
    def started(self) -> bool:
        """Whether any tensor was ever updated: from then on the store counts, not the tensors."""
        return any(self.store.tensor_steps)

    def create_again(self, groups: Sequence[dict[str, Any]]) -> None:
        """A new store from the tensors as they are now, in the place of the one that was never trained."""
        flat = self._flatten(groups, self._settings.new_extent_params)
        self.schedule.close()
        self.store.close()
        for path in self.paths:
            path.unlink()
        self.flat = flat
        self._create()
        self.schedule = self._scheduled()

    def rollback(self) -> None:
        """The step before, in store and tensors. Raises StateError."""
        self.store.rollback()
        self.take_store()

    def agrees(self) -> bool:
        """Whether every tensor is what the store has of it, in the tensor's own dtype."""
        return all(
            self.flat.agrees(extent.start, extent.stop, stored.view(np.float32))
            for extent, stored in self._parameters()
        )

    def close(self) -> None:
        """Close the store, free device memory, close the devices that were opened here; it may be called twice."""
        self._life.close()

    def _flatten(self, groups: Sequence[dict[str, Any]], extent_params: int) -> FlatParameters:
        return FlatParameters(groups, self._settings.copy_format, extent_params, self._arrays)

    @staticmethod
    def _open(device: str | Device, life: contextlib.ExitStack) -> Device:
        return life.enter_context(open_device(device, "update")) if isinstance(device, str) else device

    def _create(self) -> None:
        self.store = StateStore.create(
            self.paths,
            self.flat.manifest,
            profile=str(self._settings.profile),
            initial=self.flat.put_parameters,
            stripe_ratio=self._settings.stripe_ratio,
            direct=self._settings.direct,
        )
        self.flat.note_versions()

    def _resume(self, groups: Sequence[dict[str, Any]]) -> None:
        self.store = store = StateStore.open(self.paths, direct=self._settings.direct)
        with contextlib.ExitStack() as on_error:
            on_error.callback(store.close)
            self.flat = self._flatten(groups, store.manifest.extent_params)
            if difference := store.manifest.difference(self.flat.manifest):
                raise StateError(f"parameters must be those of {self.paths[0]}: {difference}")
            if store.profile != self._settings.profile:
                raise StateError(
                    f"profile must be {store.profile!r} as in {self.paths[0]}, not {str(self._settings.profile)!r}; "
                    "another operation order would change the results unseen"
                )
            self.load_parameters()
            on_error.pop_all()

    def take_store(self) -> None:
        """The store is at another step than that of tensors, device memory and residual: bring them there."""
        self.schedule.forget()
        self.load_parameters()
        self._load_residual()

    def load_parameters(self) -> None:
        """Bring the stored parameters into the tensors."""
        for extent, stored in self._parameters():
            self.flat.stage(extent.start, extent.stop, stored, CopyFormat.NONE)
        self.flat.publish(range(len(self.flat.tensors)))

    def _parameters(self) -> Iterator[tuple[Extent, NDArray[np.uint8]]]:
        """The stored p, extent by extent, in memory that the next one takes over."""
        extents = self.store.manifest.extents
        memory = aligned_buffer(extents[0].size_bytes)
        for extent in extents:
            self.store.read("p", extent, memory[: extent.size_bytes])
            yield extent, memory[: extent.size_bytes]

    def _scheduled(self) -> Schedule:
        # Files that were given in another order are in the store's: each stays beside its device.
        devices = [self._device_of[path] for path in self.store.paths]
        settings = self._settings
        self.compressor, stream_bytes = None, 0
        if settings.compression is not None:
            self.compressor = Compressor(settings.compression, self.store.manifest.params)
            params = self.store.manifest.extent_params
            stream_bytes = longest_stream_bytes(params, params, settings.compression.wire_format)
            self._load_residual()
        return Schedule(self.store, devices, self.traffic, self._timeline, settings.resident_bytes, stream_bytes)

    def _load_residual(self) -> None:
        if self.compressor is not None:
            names = [array.name for array in self.store.manifest.arrays if array.name in HOST_ARRAYS]
            stored = {name: self.store.read_array(name) for name in names}
            held = self.compressor.arrays()
            self.compressor.load({name: values.view(held[name].dtype) for name, values in stored.items()})
