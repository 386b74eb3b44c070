"""What all near-storage optimizers share: torch's interface over a state store and its devices.

Per step only gradients go down the host link, and parameters (or their fp16/bf16 copy) come back. The step becomes
visible in one piece: new states go to the spare slots of the store, that is committed, and then the torch tensors are
written; a failure before the commit leaves store and tensors at the step before.

Order: every gradient is checked, then the global norm, then gradients are multiplied by 1/(clip·scale) as they are
gathered, and the product is rounded once to fp32; then the update. Each tensor has its own step count and is padded to
32 elements. Results equal nearflash.model of the same profile to the bit, on any devices and with either `overlap`.
Host memory: one extra copy of the parameters, in their own dtype.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, StateError
from nearflash.abi.optimizers import OptimizerStep, Profile, StateFormat
from nearflash.storage import Manifest
from nearflash.training.optimizers.export import full_state, take_full_state
from nearflash.training.optimizers.settings import Settings
from nearflash.training.step.runner import Stepping
from nearflash.training.step.stalls import Stalls
from nearflash.training.step.state import Master, arrays_of
from nearflash.training.step.timeline import Timeline
from nearflash.training.step.traffic import Traffic

__all__ = ["NearStorageOptimizer"]

_IDENTITY, _STEP = "nearflash_identity", "nearflash_step"
"""What `state_dict` holds of each tensor beside its step count: plain integers, which every tool carries along."""


class NearStorageOptimizer(torch.optim.Optimizer):
    """A torch optimizer over a state store and its devices; subclasses add their arguments and `rule`.

    params: tensors, named tensors, or groups of them, as torch's; scalars are read from the groups at each step.
    defaults: of the groups. options: see nearflash.training.optimizers.settings.Settings.

    Raises StateError, StorageFullError, FormatError, CommandError, and what `open_device` raises.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to `step`, by grad_scale, found_inf

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Any) -> None:
        for name in ("foreach", "fused", "capturable", "differentiable"):
            if options.pop(name, None) and name in ("capturable", "differentiable"):
                raise CommandError(f"{name} must be False, not True: the update is none of torch's own; leave it out")
        self._settings = settings = Settings(**options)
        self.timeline = settings.timeline or Timeline()
        self._master: Master | None = None
        super().__init__(params, defaults)
        rules = [self.rule(group, step=1) for group in self.param_groups]
        self._master = Master(self.param_groups, arrays_of(rules, settings.compression), settings, self.timeline)
        self._stepping = Stepping(self._master, settings, self.timeline, lambda: self.param_groups, self.rule)
        self._refresh_handle()

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        raise NotImplementedError

    def _common(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Arguments of every rule."""
        return {
            "lr": float(group["lr"]),
            "step": step,
            "weight_decay": float(group["weight_decay"]),
            "profile": Profile(self._settings.profile),
            "state_format": StateFormat(self._settings.state_format),
        }

    # torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss.

        Raises NonFiniteError, ShapeError, FormatError, CommandError before anything was touched; StateError,
        StorageFullError, DeviceError, WaitTimeoutError with store and tensors left at the step before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        with self.timeline.span("step", step=self.steps + 1):
            self._stepping.step(None if grad_scale is None else float(grad_scale), bool(found_inf))
        self._refresh_handle()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; updates that backward has begun are discarded."""
        self._stepping.discard()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, until the first step. Raises StateError after it."""
        if self._master is not None and self._master.started:
            raise StateError(
                f"parameter groups must be complete before the first step, and {self.path} is at step "
                f"{self.steps}; construct a new optimizer, on another path"
            )
        super().add_param_group(param_group)
        if self._master is not None:
            self._stepping.detach()
            self._master.create_again(self.param_groups)
            self._stepping.attach()
            self._refresh_handle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters from a `state_dict()`, whose handle must be that of this store at this step.

        The state itself is not in the dict: it is in the store. Raises StateError for another store or step.
        """
        states = list(state_dict["state"].values())
        if not states or not all(_IDENTITY in state for state in states):
            raise StateError(
                f"state_dict must come from a {type(self).__name__} (it holds a handle to the state file), not from "
                "another optimizer; use load_full_state_dict for that"
            )
        for state in states:
            for name, key, mine in (("identity", _IDENTITY, self._identity), ("step", _STEP, self.steps)):
                if state[key] != mine:
                    raise StateError(
                        f"state_dict must be of {name} {mine!r} as in {self.path}, not {state[key]!r}; "
                        "open the state file that belongs to it"
                    )
        super().load_state_dict(state_dict | {"state": {}})
        self._refresh_handle()

    # Mixed precision, accumulation

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by: 1 without `loss_scale`."""
        scale = self._stepping.loss_scale
        return 1.0 if scale is None else scale.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times `loss_scale`: call backward on this."""
        return loss * self.loss_scale

    def accumulating(self) -> AbstractContextManager[None]:
        """For backward passes that others of the same step follow, as DistributedDataParallel.no_sync.

        Needed with overlap="backward" only, and there only for speed: what began too early is done again.
        """
        backward = self._stepping.backward
        return nullcontext() if backward is None else backward.accumulating()

    # What happened

    @property
    def extra(self) -> dict[str, Any]:
        """JSON values of the training script, committed with each step and here again after a resume."""
        return self._stepping.extra

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients, unscaled, before clipping."""
        return self._stepping.grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps without effect since construction, as gradients had overflowed."""
        return self._stepping.skipped_steps

    @property
    def wrong_guesses(self) -> int:
        """Steps that were begun during backward, and then done again."""
        backward = self._stepping.backward
        return 0 if backward is None else backward.wrong

    @property
    def stalls(self) -> Stalls:
        """What the last step waited for."""
        return self._stepping.stalls

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far."""
        return self._owned.traffic

    # Life

    @property
    def path(self) -> Path:
        """The (first) state file."""
        return self._owned.paths[0]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The state files, by device."""
        return self._owned.paths

    @property
    def profile(self) -> Profile:
        """Operation order of the update."""
        return Profile(self._settings.profile)

    @property
    def steps(self) -> int:
        """Committed steps of the store."""
        return self._owned.store.steps

    @property
    def manifest(self) -> Manifest:
        """Where each tensor lies in the stored arrays."""
        return self._owned.store.manifest

    def read_array(self, array: str) -> NDArray[np.float32]:
        """A stored fp32 array (p, m or v) as of the last committed step: the flat vector, padding included."""
        return self._owned.store.read_array(array)

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` as torch.optim has it, with the whole state in memory (nearflash.training.optimizers.export)."""
        return super().state_dict() | {"state": full_state(self._owned.flat, self._owned.store)}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `full_state_dict`, or torch's optimizer of the same kind, gave: the next step's state.

        Parameters are the tensors' present ones, so load the model first (`master` parameters are in the dict).
        Raises StateError, ShapeError for what does not fit; nothing was changed then.
        """
        self._stepping.discard()
        take_full_state(self._owned.flat, self._owned.store, state_dict["state"])
        self._owned.take_store()
        super().load_state_dict(state_dict | {"state": {}})
        self._refresh_handle()

    @torch.no_grad()
    def rollback(self) -> None:
        """Undo the last step, exactly and durably, in store and tensors: until the next one begins.

        Raises StateError where the step before is not there any more; nothing was changed then.
        """
        self._stepping.rollback()
        self._refresh_handle()

    def verify(self) -> list[str]:
        """Read the whole state; one message for each damaged extent."""
        return self._owned.store.verify()

    def snapshot(self, folder: str | Path) -> list[Path]:
        """Files of the last committed step in a folder, which open like these. Raises as StateStore.snapshot."""
        return self._owned.store.snapshot(Path(folder))

    def close(self) -> None:
        """Close the store, free device memory, and close the devices that the optimizer opened."""
        self._stepping.detach()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _owned(self) -> Master:
        assert self._master is not None, "torch's constructor has returned"
        return self._master

    @property
    def _identity(self) -> int:
        return int(self._owned.store.identity, 16)

    def _refresh_handle(self) -> None:
        store = self._owned.store
        for tensor, updates in zip(self._owned.flat.tensors, store.tensor_steps, strict=True):
            self.state[tensor] = {"step": updates, _IDENTITY: self._identity, _STEP: store.steps}
