"""What all near-storage optimizers share: torch's interface over a state store and its devices.

Per step only gradients go down the host link, and parameters (or their fp16/bf16 copy) come back. The step becomes
visible in one piece: new states go to the spare slots of the store, that is committed, and then the torch tensors are
written; a failure before the commit leaves store and tensors at the step before.

Order: every gradient is checked, then the global norm, then gradients are multiplied by 1/(clip·scale) as they are
gathered, and the product is rounded once to fp32; then the update. Each tensor has its own step count and is padded to
32 elements. Results equal nearflash.model of the same profile to the bit, on any devices and with either `overlap`.
Host memory: one more copy of the parameters, in their own dtype.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self, Unpack

import torch

from nearflash.abi.errors import StateError
from nearflash.abi.optimizers import OptimizerStep, Profile, StateFormat
from nearflash.training.optimizers.full_state import full_state, load_full_state
from nearflash.training.optimizers.options import Options, Settings, document
from nearflash.training.optimizers.store import OptimizerStore
from nearflash.training.step.optimizer_state import OptimizerState, arrays_of
from nearflash.training.step.report import Report
from nearflash.training.step.step_runner import StepRunner
from nearflash.training.step.worker import Worker

__all__ = ["NearStorageOptimizer"]

_IDENTITY, _STEP = "nearflash_identity", "nearflash_step"
"""What `state_dict` holds of each tensor beside its step count: plain integers, which every tool carries along."""


class NearStorageOptimizer(torch.optim.Optimizer):
    """A torch optimizer over a state store and its devices; subclasses add their arguments and `rule`.

    params: tensors, named tensors, or groups of them, as torch's; scalars are read from the groups at each step.
    defaults: of the groups.

    Raises StateError, StorageFullError, FormatError, CommandError, and what `open_device` raises.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to `step`, by grad_scale, found_inf

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        self._settings = settings = Settings.of(type(self).__name__, options)
        self._report = Report() if settings.timeline is None else Report(settings.timeline)
        self._opened: OptimizerState | None = None
        self._worker = Worker("optimizer")
        super().__init__(params, defaults)
        rules = [self.rule(group, step=1) for group in self.param_groups]
        arrays = arrays_of(rules, settings.compression)
        self._opened = OptimizerState(self.param_groups, arrays, settings, self._report)
        self._store = OptimizerStore(lambda: self._optimizer_state.store, settings.paths)
        self._runner = StepRunner(
            self._opened, settings, self._report, lambda: self.param_groups, self.rule, self._worker
        )
        self._refresh_handle()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        document(cls)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        raise NotImplementedError

    def _common(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Arguments of every rule, for subclasses."""
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
        StorageFullError, DeviceError, WaitTimeoutError with store and tensors left at the step before. StateError, too,
        after close().
        """
        if self._optimizer_state.closed:
            raise StateError("the optimizer must be open, not closed: construct it again with the same path to go on")
        self._check_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        self._worker(
            lambda: self._step(None if grad_scale is None else float(grad_scale), bool(found_inf)),
            interrupted=self._runner.interrupt,
        )
        self._refresh_handle()
        return loss

    def _step(self, grad_scale: float | None, found_inf: bool) -> None:
        with self._report.timeline.span("step", step=self.steps + 1):
            try:
                self._runner.step(grad_scale, found_inf)
            except RuntimeError as error:
                if "start new thread" not in str(error):
                    raise
                raise StateError(
                    f"a step must have threads of its own, and the system gives no more ({error}); see ulimit -u, and "
                    "the container's limit of processes"
                ) from error

    def _check_parameters(self) -> None:
        """Raise StateError where the groups' tensors are no longer those of construction and add_param_group."""
        given = {id(tensor): index for index, group in reversed(list(enumerate(self.param_groups)))
                 for tensor in group["params"]}  # fmt: skip
        flat = self._optimizer_state.flat
        if given != {id(tensor): index for tensor, index in zip(flat.tensors, flat.group_of, strict=True)}:
            raise StateError(
                'group["params"] must be the tensors that the optimizer was constructed with, in their groups, not '
                "edited: use add_param_group before the first step, or construct a new optimizer, on another path"
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's: hyper-parameters, and a handle to the store at its step; the state itself stays there."""
        self._refresh_handle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "an optimizer must not be copied or pickled, as its state is on flash; see store.snapshot, full_state_dict"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; updates that backward has begun are discarded."""
        if not self._optimizer_state.closed:
            self._worker(self._runner.discard)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, until the first step. Raises StateError after it, and what construction raises."""
        if self._opened is not None and self._opened.started:
            raise StateError(
                f"parameter groups must be complete before the first step, and {self.store.path} is at step "
                f"{self.steps}; construct a new optimizer, on another path"
            )
        super().add_param_group(param_group)
        if self._opened is not None:
            try:
                self._worker(self._runner.recreate)
            except BaseException:
                self.param_groups.pop()
                raise
            self._refresh_handle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters from a `state_dict()`, whose handle must be that of this store at this step.

        The state itself is not in the dict: it is in the store. Raises StateError for another store or step.
        """
        if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise StateError(f"state_dict must have {' and '.join(missing)}, as `state_dict()` gives it")
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
                        f"state_dict must be of {name} {mine!r} as in {self.store.path}, not {state[key]!r}; "
                        "open the state file that belongs to it"
                    )
        super().load_state_dict(state_dict | {"state": {}})
        self._refresh_handle()

    # Mixed precision, accumulation

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by: 1 without the option `loss_scale`."""
        scale = self._runner.loss_scale
        return 1.0 if scale is None else scale.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times `loss_scale`: call backward on this."""
        return loss * self.loss_scale

    def accumulating(self) -> AbstractContextManager[None]:
        """For backward passes that others of the same step follow, as DistributedDataParallel.no_sync.

        Needed with overlap="backward" only, and there only for speed: what began too early is done again.
        """
        return self._runner.accumulating()

    # State

    @property
    def steps(self) -> int:
        """Committed steps of the store."""
        return self._optimizer_state.store.steps

    @property
    def metadata(self) -> dict[str, Any]:
        """JSON values of the training script, to change in place: committed with each step, there after a resume."""
        return self._runner.metadata

    @property
    def store(self) -> OptimizerStore:
        """The state on flash: status, verify, snapshot, export."""
        return self._store

    @property
    def report(self) -> Report:
        """Traffic, stalls, timeline, gradient norm, skipped steps, mispredictions."""
        return self._report

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` as torch.optim has it, the whole state in memory (nearflash.training.optimizers.full_state)."""
        state = self._optimizer_state
        return super().state_dict() | {"state": full_state(state.flat, state.store)}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make what `full_state_dict`, or torch's optimizer of the same kind, gave the state of the next step.

        Parameters are the tensors' present ones, so load the model first (`master` parameters are in the dict).
        Raises StateError, ShapeError for what does not fit; nothing was changed then.
        """
        state = self._optimizer_state

        def load() -> None:
            self._runner.discard()
            load_full_state(state.flat, state.store, state_dict["state"])
            state.reload()

        self._worker(load)
        super().load_state_dict(state_dict | {"state": {}})
        self._refresh_handle()

    @torch.no_grad()
    def rollback(self) -> None:
        """Undo the last step, exactly and durably, in store and tensors: until the next one begins.

        Raises StateError where the step before is not there any more; nothing was changed then.
        """
        self._worker(self._runner.rollback)
        self._refresh_handle()

    def close(self) -> None:
        """Close the store, free device memory, and close the devices that the optimizer opened."""
        if not self._optimizer_state.closed:
            self._worker(self._close)
        self._worker.close()

    def _close(self) -> None:
        self._runner.detach()
        self._optimizer_state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _optimizer_state(self) -> OptimizerState:
        assert self._opened is not None, "torch's constructor has returned"
        return self._opened

    @property
    def _identity(self) -> int:
        return int(self.store.identity, 16)

    def _refresh_handle(self) -> None:
        state = self._optimizer_state
        for tensor, updates in zip(state.flat.tensors, state.store.tensor_steps, strict=True):
            self.state[tensor] = {"step": updates, _IDENTITY: self._identity, _STEP: state.store.steps}
