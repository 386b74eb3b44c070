"""AdamW for torch whose parameters' masters and moments live on flash, updated by a device beside it.

Per step only gradients go down the host link, and parameters (or their fp16/bf16 copy) come back. The step becomes
visible in one piece: p, m and v go to the spare slot of the state file, that is committed, and then the torch tensors
are written; a failure before the commit leaves file and tensors at the step before.

Numerics: each tensor has its own step count and is padded to 16 elements; results equal nearflash.model of the same
profile to the bit, on every device. Host memory: one extra copy of the parameters, in their own dtype.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.errors import FormatError, NearflashError, StateError
from nearflash.abi.rules import Profile
from nearflash.device import Device, open_device
from nearflash.storage import Extent, Manifest, StateFile, aligned_buffer
from nearflash.training.parameters import FlatParameters
from nearflash.training.plan import Rule, Run, plan
from nearflash.training.timeline import Timeline
from nearflash.training.traffic import Traffic
from nearflash.training.transfer import Transfer

__all__ = ["NearStorageAdamW"]

STATE_NAME = "optimizer.state"
"""File name inside a directory given as `path`."""
EXTENT_PARAMS = 1 << 20
"""Parameters per extent: 4 MiB an array, well over the 1 MB that NVMe drives need for their full rate."""
_HANDLE = "nearflash"


class NearStorageAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's interface over a state file and a device; `decoupled=False` makes it Adam with L2.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW, per group, read at each step.
    device: a name for `open_device` or an open Device (then not closed by `close`).
    path: the state file, or a directory that gets one (`optimizer.state`).
    copy: None when all parameters are fp32; "fp16" or "bf16" when some have that dtype.
    resume: False makes a new file and refuses an existing one; True needs one and loads its parameters into the
    tensors; "auto" does what the path calls for.
    extent_params: parameters per chunk of I/O, a multiple of 1024 (a resumed file keeps its own).
    direct: False goes through the page cache, for file systems without O_DIRECT.
    timeline: where the spans of each step are noted; a new one unless given.

    Raises StateError, StorageFullError, FormatError, CommandError, and what `open_device` raises.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        path: str | Path,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
        profile: Profile | str = Profile.IEEE,
        copy: Literal["fp16", "bf16"] | None = None,
        device: str | Device = "host:update-smartssd",
        resume: bool | Literal["auto"] = False,
        extent_params: int = EXTENT_PARAMS,
        direct: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self._state: StateFile | None = None
        self._rule, self._copy = Rule(_profile(profile), decoupled), _copy_format(copy)
        self._extent_params, self._direct = extent_params, direct
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            self._rule.scalars(group, step=1)
        self.traffic, self.timeline = Traffic(), timeline or Timeline()
        self._path = Path(path) / STATE_NAME if Path(path).is_dir() else Path(path)
        self._flat = FlatParameters(self.param_groups, self._copy, extent_params)
        exists = self._path.exists()
        if exists and not resume:
            raise StateError(
                f"{self._path} must not exist yet: pass resume=True to go on from it, or give another path"
            )
        self._owns_device = isinstance(device, str)
        self._device = open_device(device) if isinstance(device, str) else device
        try:
            if exists or resume is True:
                self._resume()
            else:
                self._create()
            self._transfer = Transfer(self._device, self._file, self.traffic)
        except BaseException:
            self._release()
            raise

    # torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss.

        Raises NonFiniteError, ShapeError, FormatError, CommandError before anything was touched; StateError,
        StorageFullError, DeviceError, WaitTimeoutError with file and tensors left at the step before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_outside_changes()
        active = self._flat.check_gradients()
        if not active:
            return loss
        steps = list(self._file.tensor_steps)
        runs = plan(self._flat, self.param_groups, active, steps, self._rule)
        for tensor in active:
            steps[tensor] += 1
        with self.timeline.span("step", step=self.steps + 1):
            self._advance(runs, steps)
            with self.timeline.span("publish"):
                self._flat.publish(active)
        self.traffic.steps += 1
        self._refresh_handle()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, until the first step. Raises StateError after it."""
        if self._state is not None and self._state.step > 0:
            raise StateError(
                f"parameter groups must be complete before the first step, and {self._path} is at step "
                f"{self._state.step}; construct a new optimizer, on another path"
            )
        super().add_param_group(param_group)
        if self._state is not None:
            self._flat = FlatParameters(self.param_groups, self._copy, self._extent_params)
            self._create_again()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters from a `state_dict()`, whose handle must be that of this file at this step.

        The state itself is not in the dict: it is in the file. Raises StateError for another file or step.
        """
        handle = state_dict["state"].get(_HANDLE)
        if handle is None:
            raise StateError(
                "state_dict must come from a NearStorageAdamW (it holds a handle to the state file), "
                "not from another optimizer"
            )
        for name, mine in (("identity", self._file.identity), ("step", self._file.step)):
            if handle[name] != mine:
                raise StateError(
                    f"state_dict must be of {name} {mine!r} as in {self._path}, not {handle[name]!r} of "
                    f"{handle['path']}; open the state file that belongs to it"
                )
        super().load_state_dict(state_dict)
        self._refresh_handle()

    # Life

    @property
    def path(self) -> Path:
        """The state file."""
        return self._path

    @property
    def profile(self) -> Profile:
        """Operation order of the update."""
        return self._rule.profile

    @property
    def steps(self) -> int:
        """Committed steps of the state file."""
        return self._file.step

    def read_array(self, array: str) -> NDArray[np.float32]:
        """A stored array ("p", "m" or "v") as of the last committed step: the flat vector, padding included."""
        return self._file.read_array(array)

    @property
    def manifest(self) -> Manifest:
        """Where each tensor lies in the stored arrays."""
        return self._file.manifest

    def verify(self) -> list[str]:
        """Read the whole state; one message for each damaged extent."""
        return self._file.verify()

    def close(self) -> None:
        """Close the state file, free device memory, and close the device if the optimizer opened it."""
        self._transfer.close()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _file(self) -> StateFile:
        assert self._state is not None
        return self._state

    def _release(self) -> None:
        if self._state is not None:
            self._state.close()
        if self._owns_device:
            self._device.close()

    # State

    def _create(self) -> None:
        self._state = StateFile.create(
            self._path,
            self._flat.manifest,
            profile=self._rule.profile,
            initial=self._flat.put_parameters,
            direct=self._direct,
        )
        self._flat.note_versions()
        self._refresh_handle()

    def _create_again(self) -> None:
        """Before the first step the tensors are what counts, not the file."""
        self._transfer.close()
        self._file.close()
        self._path.unlink()
        self._create()
        self._transfer = Transfer(self._device, self._file, self.traffic)

    def _resume(self) -> None:
        self._state = state = StateFile.open(self._path, direct=self._direct)
        self._flat = FlatParameters(self.param_groups, self._copy, state.manifest.extent_params)
        if difference := state.manifest.difference(self._flat.manifest):
            raise StateError(f"parameters must be those of {self._path}: {difference}")
        if state.profile != self._rule.profile:
            raise StateError(
                f"profile must be {state.profile!r} as in {self._path}, not {str(self._rule.profile)!r}; "
                "another operation order would change the results unseen"
            )
        for extent in state.manifest.extents:
            memory = aligned_buffer(extent.size_bytes)
            state.read("p", extent, memory)
            self._flat.stage(extent.start, extent.stop, memory, CopyFormat.NONE)
        self._flat.publish(range(len(self._flat.tensors)))
        self._refresh_handle()

    def _take_outside_changes(self) -> None:
        changed = self._flat.changed()
        if changed and self._file.step > 0:
            raise StateError(
                f"parameter {changed[0]!r} must be changed by this optimizer only, but others wrote to it after step "
                f"{self._file.step} and the stored master would undo that; construct a new optimizer from the tensors"
            )
        if changed:
            self._create_again()

    def _refresh_handle(self) -> None:
        # Under a key that is no parameter torch carries this through state_dict() and load_state_dict() as it is.
        state: dict[Any, Any] = self.state
        state[_HANDLE] = {
            "path": str(self._path.resolve()),
            "identity": self._file.identity,
            "step": self._file.step,
        }

    # Step

    def _advance(self, runs: list[Run], steps: list[int]) -> None:
        try:
            for extent in self.manifest.extents:
                self._update(extent, runs)
            with self.timeline.span("commit"):
                self._file.commit(steps)
        except BaseException:
            self._file.discard()
            with contextlib.suppress(NearflashError):
                self._device.reset()
            raise

    def _update(self, extent: Extent, runs: list[Run]) -> None:
        """Carry one extent into the spare slot, updated where runs cover it and as it is elsewhere."""
        span, transfer = self.timeline.span, self._transfer
        with span("flash read", extent=extent.index):
            transfer.load(extent)
        for run in runs:
            start, stop = max(run.start, extent.start), min(run.stop, extent.stop)
            if start < stop:
                first, last = start - extent.start, stop - extent.start
                with span("gather gradients", params=stop - start):
                    self._flat.put_gradients(start, stop, transfer.gradients(first, last))
                with span("update", params=stop - start):
                    new = transfer.update(run.adam, first, last, run.copy)
                with span("stage", params=stop - start):
                    self._flat.stage(start, stop, new, run.copy)
        with span("flash write", extent=extent.index):
            transfer.store(extent)


def _profile(profile: Profile | str) -> Profile:
    if profile not in list(Profile):
        raise FormatError(f"profile must be one of {', '.join(Profile)}, not {profile!r}")
    return Profile(profile)


def _copy_format(copy: str | None) -> CopyFormat:
    formats = {None: CopyFormat.NONE, "fp16": CopyFormat.FP16, "bf16": CopyFormat.BF16}
    if copy not in formats:
        raise FormatError(f"copy must be None, 'fp16' or 'bf16', not {copy!r}")
    return formats[copy]
