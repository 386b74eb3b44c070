"""The state of an optimizer's tensors: the store on flash, the devices beside it, and their schedule."""

import contextlib
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, LostStepWarning, NearflashError, StateError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers import MasterFormat
from nearflash.abi.topk import longest_stream_bytes
from nearflash.device import Device, open_device
from nearflash.storage import Extent, StateArray, StateStore, aligned_buffer
from nearflash.storage.state.carry import carry_over
from nearflash.storage.state.delta_log import (
    ACCEPTED,
    RESERVED,
    UNCOUNTED,
    DeltaLog,
    StepDelta,
    TensorMark,
    WeightDelta,
    log_folder,
    read_deltas,
)
from nearflash.storage.state.superblock import Stamp
from nearflash.training.gradients.compression import Compressor
from nearflash.training.step.extent_update import ExtentUpdate
from nearflash.training.step.fingerprint import GradientFingerprints
from nearflash.training.step.muon import Orthogonalizer
from nearflash.training.step.parameters import FlatParameters, Gradients
from nearflash.training.step.plan import StepPlan
from nearflash.training.step.report import Report
from nearflash.training.step.schedule import Schedule, Step
from nearflash.training.step.scratch import GradientScratch
from nearflash.training.step.settings import StepSettings
from nearflash.training.step.state_checks import check_mark, check_room, mark_of
from nearflash.training.step.streamed import is_streamed
from nearflash.training.step.transfer import HOST_ARRAYS, build_of

__all__ = ["RESERVED", "OptimizerState"]


class OptimizerState:
    """Devices, and the store beside them, created or opened; its parameters then are the tensors'.

    Raises StateError, StorageFullError, FormatError, and what `open_device` raises.
    """

    flat: FlatParameters
    store: StateStore

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        arrays: Sequence[StateArray],
        settings: StepSettings,
        report: Report,
        optimizer: str,
    ) -> None:
        """optimizer: the name that the state is marked with; empty marks and compares nothing."""
        self._report, self._settings, self._arrays = report, settings, arrays
        self._mark = mark_of(optimizer)
        self._schedule: Schedule
        self._compressor: Compressor | None = None
        self._closed = False
        self._held = contextlib.ExitStack()
        """The scratch file, and the devices that were opened here."""
        self._device_of: dict[Path, Device] = {}
        self._in_use: list[Schedule] = []
        """The schedule, for `abandoned`."""
        self.unpublished = False
        """Whether the store has a step that not all tensors have, since publishing it failed: `reload` comes next."""
        self._paths = settings.paths
        self.scratch: GradientScratch | None = None
        self.flat = self._flatten(groups, settings.new_extent_params)
        exists = [path for path in self._paths if path.exists()]
        if exists and not settings.resume:
            raise StateError(
                f"{exists[0]} must not exist yet: pass resume=True to resume from it, or give another path"
            )
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.give_back)
            self.open_devices()
            if exists or settings.resume in (True, "exact"):
                self._resume(groups)
            else:
                self._create()
            on_error.callback(lambda: self.store.close())
            self.begin_use()
            on_error.pop_all()

    @property
    def started(self) -> bool:
        """Whether the store counts: a step or a state that was loaded was committed, or tensors are streamed."""
        return self.store.steps > 0 or any(map(is_streamed, self.flat.tensors))

    @property
    def uncounted(self) -> int:
        """Commits of the store that were no steps: of parameters that were accepted."""
        return int(self.store.metadata.get(RESERVED, {}).get(UNCOUNTED, 0))

    def make_finalizer(self) -> Callable[[], None]:
        """Make a call that ends the use of files and devices, from another thread, once nobody refers to this."""
        in_use = self._in_use  # and not self, which would keep it alive

        def end() -> None:
            for schedule in in_use:
                schedule.close()
                schedule.store.close()
            in_use.clear()

        return end

    @property
    def closed(self) -> bool:
        """After `close`, and after a `recreate` that failed."""
        return self._closed

    # A step

    def begin_step(self) -> Step:
        """A step that reads what it is offered; what an attempt before this one had left out is forgotten."""
        if self._compressor is not None:
            self._compressor.abort()
        return self._schedule.begin()

    def abort_step(self) -> None:
        """Have the step that was begun last end as soon as it can, whatever it has done; from any thread."""
        if self._schedule.step is not None:
            self._schedule.step.abort()

    def extent_order(self, tensors: Iterable[int]) -> list[Extent]:
        """The extents of these tensors, in the order that suits the next step."""
        wanted = set(self.flat.extents_of(tensors))
        return [extent for extent in self._schedule.order() if extent in wanted]

    def updater(
        self, plan: StepPlan, gathered: GradientFingerprints | None = None, given: Gradients | None = None
    ) -> ExtentUpdate:
        """The update stage of the next step. gathered: takes the fingerprints of the gradients that are gathered.

        given: gradients, by tensor, that are read in the place of what the tensors have.
        """
        given = {} if given is None else given
        orthogonalizer = Orthogonalizer(self.flat, self.store, self._report.traffic, given)
        step, timeline = self.store.steps + 1, self._report.timeline
        return ExtentUpdate(
            self.flat, plan, timeline, self._compressor, step, gathered, orthogonalizer, given,
            compare=self._settings.delta_bytes > 0,
        )  # fmt: skip

    def commit(self, tensors: Sequence[int], metadata: Mapping[str, Any]) -> None:
        """Make a finished step, which updated `tensors`, the store's state, then the tensors' contents.

        metadata: the training script's, and under RESERVED the optimizer's own.
        """
        steps, before = list(self.store.tensor_steps), self.store.steps
        for tensor in tensors:
            steps[tensor] += 1
        try:
            with self._report.timeline.span("commit"):
                held = self.store.metadata.get(RESERVED, {})
                own = {name: held[name] for name in (UNCOUNTED, ACCEPTED) if name in held}
                reserved = metadata.get(RESERVED, {}) | own | self._mark
                values = {**metadata, RESERVED: reserved} if reserved else metadata
                self._log_delta(tensors)
                self.store.commit(steps, values, self.flat.extents_of(tensors))
        finally:
            self.unpublished = self.store.steps > before
        if self._compressor is not None:
            self._compressor.commit()
        with self._report.timeline.span("publish"):
            self.flat.publish(tensors)
        self.unpublished = False

    def _log_delta(self, tensors: Sequence[int]) -> None:
        """Make durable what the step that is to be committed changes. Raises StorageFullError, StateError."""
        if not self._settings.delta_bytes:
            return
        marks = [
            TensorMark(entry.name, entry.shape, entry.dtype, before, after)
            for entry, (before, after) in zip(self.flat.entries, self.flat.marks(set(tensors)), strict=True)
        ]
        pieces = [(index, first, stream) for index in tensors for first, stream in self.flat.deltas[index].items()]
        commit = self.store.steps + 1
        pieces.sort(key=lambda piece: piece[:2])
        delta = StepDelta(self.store.identity, commit, commit - self.uncounted, tuple(marks), tuple(pieces))
        DeltaLog(log_folder(self.store.paths[0]), self._settings.delta_bytes).write(delta)
        for deltas in self.flat.deltas:
            deltas.clear()
        self._report.traffic.add(delta_bytes=delta.size_bytes)

    def delta(self, since: int) -> WeightDelta:
        """Merge what the steps after `since` changed. Raises StateError where they are not all kept."""
        if not self._settings.delta_bytes:
            raise StateError("delta_bytes must be given at construction for steps to keep what they change, not 0")
        if self.unpublished:
            raise StateError("the last step must be published for its delta; make another step, or construct again")
        return read_deltas(self.store, since)

    def rollback(self) -> None:
        """The step before, in store and tensors. Raises StateError."""
        self.flat.check_memory()
        self.store.rollback()
        self.reload()

    # Store and tensors

    def recreate(
        self, groups: Sequence[dict[str, Any]], arrays: Sequence[StateArray], also: Collection[str] = ()
    ) -> None:
        """A new store from the tensors as they are now, in the place of the one that was never trained.

        Raises StorageFullError, with the store as it was, where the disk has no room even without that one. Where
        creation fails later all is closed: the files are gone, in which nothing was trained.
        """
        held, self._arrays = self._arrays, tuple(arrays)
        try:
            self.store.check_names()
            flat = self._flatten(groups, self._settings.new_extent_params, also)
            check_room(self.store, flat.manifest)
        except BaseException:
            self._arrays = held
            raise
        try:
            self._schedule.close()
            self.store.close()
            for path in self._paths:
                path.unlink()
            self.flat = flat
            self._create()
            self.begin_use()
        except BaseException:
            self.close()
            raise

    def grow(self, groups: Sequence[dict[str, Any]], arrays: Sequence[StateArray], also: Collection[str] = ()) -> None:
        """State, zero, for tensors of the groups that have none and are trained, or are named in `also`.

        arrays: those that are stored from then on. Copies the state once: needs room for both. Raises StorageFullError,
        StateError, and what construction raises, with all as it was.
        """
        stored = {entry.name for entry in self.store.manifest.tensors}
        held, self._arrays = self._arrays, tuple(arrays)
        try:
            flat = self._flatten(groups, self.store.manifest.extent_params, stored | set(also))
            steps = dict(zip((entry.name for entry in self.flat.entries), self.store.tensor_steps, strict=True))
            if missing := stored.difference(entry.name for entry in flat.entries):
                raise StateError(f"tensors with state must stay in the parameter groups, but {min(missing)!r} is gone")
            self._replace(flat, self.store, self.store.stamp, [steps.get(entry.name, 0) for entry in flat.entries])
        except BaseException:
            self._arrays = held
            raise

    def restore(self, snapshot: StateStore) -> None:
        """Be at the step of a snapshot, in store and tensors. Raises StateError, StorageFullError, with all as it was.

        The snapshot's files stay; what was trained since it is gone.
        """
        self.flat.check_memory()
        check_mark(snapshot, self._mark)
        manifest, of = self.store.manifest, f"of the snapshot {snapshot.paths[0]}"
        described = {(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors}
        for entry in snapshot.manifest.tensors:
            if (entry.name, entry.shape, entry.dtype) not in described:
                raise StateError(f"parameters must be those {of}, but {entry.describe()} is none of this optimizer's")
        if snapshot.manifest.arrays != manifest.arrays or snapshot.profile != self.store.profile:
            raise StateError(
                f"stored arrays and profile must be those {of}, {snapshot.profile!r} with "
                f"{[array.name for array in snapshot.manifest.arrays]}: construct the optimizer as for that run"
            )
        steps = dict(zip((entry.name for entry in snapshot.manifest.tensors), snapshot.tensor_steps, strict=True))
        for entry, updates in zip(manifest.tensors, self.store.tensor_steps, strict=True):
            if updates and entry.name not in steps:
                raise StateError(
                    f"{entry.name!r} had no state yet at the step {of}, and its weights were trained since: load the "
                    "model's weights of that step and construct an optimizer with the snapshot as its path, resume=True"
                )
        tensor_steps = [steps.get(entry.name, 0) for entry in manifest.tensors]
        self._replace(self.flat, snapshot, snapshot.stamp, tensor_steps)
        self.reload()

    def _replace(self, flat: FlatParameters, source: StateStore, stamp: Stamp, steps: Sequence[int]) -> None:
        """The content of `source`, with these tensors, in the place of the store's."""
        if self._schedule.step is not None and not self._schedule.step.ended:
            self._schedule.step.discard()
        stamp = replace(stamp, commit=secrets.token_hex(8)) if source is self.store else stamp
        fill = carry_over(source, flat.manifest, flat.put_parameters)
        store = self.store.replace(flat.manifest, fill, stamp, steps, source.metadata)
        self.store, self.flat = store, flat
        try:
            self._schedule.close()
            self.begin_use()
        except BaseException:
            self.close()
            raise

    def accept(self) -> None:
        """Make the tensors' present values the parameters of the store, durably; all else stays.

        Masters whose rounded value a tensor still has stay, too. Raises StorageFullError, StateError.
        """
        self.flat.check_memory()
        changed = self.flat.find_changed_tensors()
        if not changed:
            return
        metadata = self.store.metadata
        metadata[RESERVED] = {**metadata.get(RESERVED, {}), UNCOUNTED: self.uncounted + 1}
        metadata[RESERVED][ACCEPTED] = self.store.steps - self.uncounted
        extents = self.flat.extents_of(changed)
        try:
            for extent, stored in self._parameters(extents):
                self.flat.put_changes(extent, set(changed), stored.view(np.float32))
                self.store.write("p", extent, stored)
            self.store.commit(self.store.tensor_steps, metadata, extents=extents, arrays=["p"])
        except BaseException:
            self.store.discard()
            raise
        self._schedule.forget()
        self.flat.note_contents()

    def reload(self) -> None:
        """Bring tensors, device memory and residual to the store's step, which was changed apart from them."""
        self.unpublished = True
        self._schedule.forget()
        self.load_parameters()
        self._load_residual()
        self.unpublished = False

    def undo_publishing(self) -> None:
        """After a step that failed: tensors that have new values already get those of the store's step again.

        Where that fails, too, `reload` comes before the next step. Raises StateError then.
        """
        flat = self.flat
        if not flat.begun or self.unpublished:
            return
        self.unpublished = True
        try:
            for extent, stored in self._parameters([self.store.manifest.extents[at] for at in sorted(flat.begun)]):
                flat.stage(extent.start, extent.stop, stored, CopyFormat.NONE)
        except NearflashError as error:
            raise StateError(
                "parameters must be read back after a step that failed, but their tensors stay as they are, of two "
                f"steps, since the store cannot be read ({error}); the next step reads them first"
            ) from error
        flat.note_undone()
        self.unpublished = False

    def agrees(self) -> bool:
        """Whether every tensor is what the store has of it, in the tensor's own dtype."""
        return all(
            self.flat.agrees(extent.start, extent.stop, stored.view(np.float32))
            for extent, stored in self._parameters()
        )

    def close(self) -> None:
        """Close the store, free device memory, close the devices that were opened here; it may be called twice."""
        self._closed = True
        self.give_back()
        self._in_use.clear()
        self.store.close()

    # What is used while it trains

    def open_devices(self) -> None:
        """Open the devices, and the scratch file where there is one."""
        settings = self._settings
        if settings.free_gradients:
            tensors = [*self.flat.tensors, *(member.tensor for member in self.flat.waiting)]
            self.flat.scratch = self.scratch = GradientScratch(
                tensors, self._paths[0], self._report.traffic, direct=settings.direct
            )
            self._held.callback(self.scratch.close)
        opened = self._held.enter_context
        devices = [opened(open_device(one, "update")) if isinstance(one, str) else one for one in settings.devices]
        for device in devices:
            build, master = build_of(device), MasterFormat(settings.master)
            if isinstance(build, UpdateConfig) and master not in build.masters:
                raise CommandError(
                    f"master must be {' or '.join(build.masters)} on {build.full_name}, not {master}; the devices host "
                    "and model, in software, have every format"
                )
        self._device_of = dict(zip(self._paths, devices, strict=True))

    def give_back(self) -> None:
        """Free what `begin_use` and `open_devices` took, and copies in host memory; it may be called twice."""
        for schedule in self._in_use:
            schedule.close()
        self._held.close()
        self._device_of.clear()
        self._compressor = self.scratch = self.flat.scratch = None
        self.flat.free_copies()

    def _flatten(
        self, groups: Sequence[dict[str, Any]], extent_params: int, stored: Collection[str] = ()
    ) -> FlatParameters:
        flat = FlatParameters(
            groups, self._settings.copy_format, extent_params, self._arrays, stored, staged=self._settings.speculates,
            master=MasterFormat(self._settings.master),
        )  # fmt: skip
        flat.scratch = self.scratch
        return flat

    def _create(self) -> None:
        self.store = StateStore.create(
            self._paths,
            self.flat.manifest,
            profile=str(self._settings.profile),
            initial=self.flat.put_parameters,
            metadata={RESERVED: self._mark} if self._mark else {},
            stripe_ratio=self._settings.stripe_ratio,
            direct=self._settings.direct,
        )
        self.flat.note_contents()

    def _resume(self, groups: Sequence[dict[str, Any]]) -> None:
        with warnings.catch_warnings():
            if self._settings.resume == "exact":
                warnings.simplefilter("error", LostStepWarning)
            try:
                self.store = store = StateStore.open(self._paths, direct=self._settings.direct)
            except LostStepWarning as lost:
                raise StateError(f'resume="exact" must find the newest step: {lost}') from lost
        with contextlib.ExitStack() as on_error:
            on_error.callback(store.close)
            check_mark(store, self._mark)
            if store.manifest.master != self._settings.master:
                raise StateError(
                    f"master must be {str(store.manifest.master)!r} as in {self._paths[0]}, not "
                    f"{str(self._settings.master)!r}; pass that, or construct a new optimizer on another path"
                )
            stored = {entry.name for entry in store.manifest.tensors}
            self.flat = self._flatten(groups, store.manifest.extent_params, stored)
            if difference := store.manifest.difference(self.flat.manifest):
                new = [entry.name for entry in self.flat.entries if entry.name not in stored]
                thaw = f"; freeze {new[0]!r}, which has no state there, construct, then thaw it" if new else ""
                raise StateError(f"parameters must be those of {self._paths[0]}: {difference}{thaw}")
            if store.profile != self._settings.profile:
                raise StateError(
                    f"profile must be {store.profile!r} as in {self._paths[0]}, not {str(self._settings.profile)!r}; "
                    "another operation order would change the results unseen"
                )
            for _ in self._parameters():  # all of them hold, before the first tensor changes
                pass
            self.load_parameters()
            on_error.pop_all()

    def load_parameters(self) -> None:
        """Give all tensors what the store has of them."""
        self.flat.prepare(range(len(self.flat.tensors)))
        for extent, stored in self._parameters():
            self.flat.stage(extent.start, extent.stop, stored, CopyFormat.NONE)
        self.flat.publish(range(len(self.flat.tensors)))

    def _parameters(self, extents: Sequence[Extent] | None = None) -> Iterator[tuple[Extent, NDArray[np.uint8]]]:
        """The stored p of these extents, all unless given, in memory that the next one takes over."""
        memory = aligned_buffer(self.store.manifest.extents[0].size_bytes)
        for extent in self.store.manifest.extents if extents is None else extents:
            self.store.read("p", extent, memory[: extent.size_bytes])
            yield extent, memory[: extent.size_bytes]

    def begin_use(self) -> None:
        """Take buffers on the devices, and the residual from the store."""
        self._schedule = self._make_schedule()
        self._in_use[:] = [self._schedule]

    def _make_schedule(self) -> Schedule:
        # The store may have another order than the paths that were given: each file stays beside its device.
        devices = [self._device_of[path] for path in self.store.paths]
        settings, report = self._settings, self._report
        self._compressor, stream_bytes = None, 0
        if settings.compression is not None:
            self._compressor = Compressor(settings.compression, self.store.manifest.params)
            params = self.store.manifest.extent_params
            stream_bytes = longest_stream_bytes(params, params, settings.compression.wire_format)
            self._load_residual()
        return Schedule(
            self.store, devices, report.traffic, report.timeline, settings.resident_bytes, stream_bytes,
            self.flat.put_weights,
        )  # fmt: skip

    def _load_residual(self) -> None:
        if self._compressor is not None:
            names = [array.name for array in self.store.manifest.arrays if array.name in HOST_ARRAYS]
            stored = {name: self.store.read_array(name) for name in names}
            held = self._compressor.arrays()
            self._compressor.load({name: values.view(held[name].dtype) for name, values in stored.items()})
