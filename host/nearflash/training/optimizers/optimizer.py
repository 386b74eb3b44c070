"""Base of near-storage optimizers: torch's interface over a state store and its devices.

Per step only gradients go down the host link, and parameters (or their fp16/bf16 copy) come back. The step becomes
visible in one piece: new states go to the spare slots of the store, and it is committed. New parameters go into the
torch tensors as they come; after a failure before the commit they are read back from the store, which still has them:
store and tensors are at the step before.

Order: every gradient is checked, then the global norm, then gradients are multiplied by 1/(clip·scale) as they are
gathered, and the product is rounded once to fp32; then the update. Each tensor has its own step count and is padded to
32 elements. Results equal nearflash.model of the same profile to the bit, on any devices and with either `overlap`.
Host memory: extents in flight, whatever the model's size; with overlap="backward", or on a GPU, one more copy of the
parameters, in their own dtype.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from nearflash.abi.errors import CommandError, NearflashError, NoGradientWarning, StateError
from nearflash.abi.optimizers import OptimizerStep, Profile, StateFormat
from nearflash.storage import StateStore
from nearflash.storage.state.delta_log import WeightDelta
from nearflash.support.closing import Closing
from nearflash.support.vector_math import prepare_vector_math
from nearflash.training.optimizers.store import OptimizerStore, snapshot_files
from nearflash.training.step.arrays import arrays_of
from nearflash.training.step.full_state import by_place, full_state
from nearflash.training.step.members import layout_of
from nearflash.training.step.optimizer_state import OptimizerState
from nearflash.training.step.report import Report
from nearflash.training.step.settings import Options, StepSettings, document
from nearflash.training.step.step_runner import StepRunner
from nearflash.training.step.worker import Worker

__all__ = ["HANDLE", "NearStorageOptimizer"]

_IDENTITY, _STEP = "nearflash_identity", "nearflash_step"
HANDLE = "step", _IDENTITY, _STEP
"""What `state_dict` holds of each tensor that has state: plain integers, which every tool carries along."""


class NearStorageOptimizer(Closing, torch.optim.Optimizer):
    """A torch optimizer over a state store and its devices; subclasses add their arguments and `rule`.

    params: tensors, named tensors, or groups of them, as torch's; scalars are read from the groups at each step.
    defaults: of the groups.

    Raises StateError, StorageFullError, FormatError, CommandError, and what `open_device` raises.
    """

    _elementwise: ClassVar[bool] = True
    """Whether the update of an element depends on that element alone, so that shards can be updated."""
    _name: str = ""
    """What states are marked with, and compared by: optimizers may store the same arrays. Empty: not at all."""

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to `step`, by grad_scale, found_inf

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        prepare_vector_math()
        self._settings = settings = StepSettings.of(type(self).__name__, options)
        self._report = Report() if settings.timeline is None else Report(settings.timeline)
        self._opened: OptimizerState | None = None
        self._worker = Worker("optimizer")
        super().__init__(params, defaults)
        rules = [self._check_rule(group, step=1) for group in self.param_groups]
        arrays = arrays_of(rules, settings.compression)
        self._opened = OptimizerState(self.param_groups, arrays, settings, self._report, self._name)
        self._store = OptimizerStore(self._find_store, settings.paths)
        self._worker.at_end(self._opened.make_finalizer())
        self._runner = StepRunner(
            self._opened, settings, self._report, lambda: self.param_groups, self._check_rule, self._worker
        )
        self._warned = False
        self._refresh_handle()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        document(cls)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        raise NotImplementedError

    def _check_rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """`rule`. Raises CommandError for a group that lacks a scalar, or has none of a number."""
        try:
            return self.rule(group, step)
        except NearflashError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CommandError(
                f"a parameter group must have numbers for {', '.join(self.defaults)}, as the defaults are, not what "
                f"fails with {error!r}"
            ) from error

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
        after close(). Without any gradient it does nothing, counts nothing, and warns once (NoGradientWarning).
        """
        self._check_open()
        self._check_parameters()
        self._check_handle()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._check_open()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        self._worker(
            lambda: self._step(None if grad_scale is None else float(grad_scale), bool(found_inf)),
            interrupted=self._runner.interrupt,
        )
        self._refresh_handle()
        if self._runner.without_gradient and not self._warned:
            self._warned = True
            warnings.warn(
                "no parameter has a gradient, so that the step did nothing and counts as none; construct the optimizer "
                "from the parameters that the model has now (load_state_dict(assign=True) replaces them)",
                NoGradientWarning,
                stacklevel=2,
            )
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
        """Raise StateError where the groups' tensors, their order or names are no longer those of construction and
        add_param_group."""
        if layout_of(self.param_groups) != self._optimizer_state.flat.layout:
            raise StateError(
                'group["params"] and their names must be those that the optimizer was constructed with, in their order '
                "and groups, not edited: use add_param_group, or construct a new optimizer, on another path"
            )

    def _check_open(self) -> None:
        if self._optimizer_state.closed:
            raise StateError("the optimizer must be open, not closed: construct it again with the same path to go on")
        self._check_acquired()

    def _check_acquired(self) -> None:
        if self._runner.released:
            raise StateError("the optimizer must be acquired, not released: call acquire() first")

    def _find_store(self) -> StateStore:
        self._check_acquired()
        return self._optimizer_state.store

    def _check_handle(self) -> None:
        """Raise StateError where `state` was edited: what it stands for is on flash, and would stay."""
        if self._shown is None:
            self._refresh_handle()
        held = {id(tensor): entry for tensor, entry in self.state.items()}
        plain = all(
            type(value) is int for entry in held.values() if isinstance(entry, dict) for value in entry.values()
        )
        if not plain or held != self._shown:  # tensors do not compare as one
            raise StateError(
                "optimizer.state must be as the optimizer keeps it, a handle to what is on flash, not edited: edit "
                "what full_state_dict() gives and pass it to load_full_state_dict ({} as its state begins again)"
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's: hyper-parameters, and a handle to the store at its step; the state itself stays there.

        Raises StateError where `state` was edited.
        """
        self._check_acquired()
        self._check_handle()
        self._refresh_handle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "an optimizer must not be copied or pickled, as its state is on flash; see store.snapshot, full_state_dict"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; updates that backward has begun are discarded, and gradients that are not in memory."""
        if not (self._optimizer_state.closed or self._runner.released):
            self._worker(self._runner.drop_gradients)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time. Raises what construction raises, StateError, StorageFullError, changing nothing.

        After the first step the state is copied once, into a file with room for the new tensors.
        """
        if self._opened is None:
            super().add_param_group(param_group)
            return
        self._check_open()
        self._check_parameters()
        self._check_handle()
        super().add_param_group(param_group)
        try:
            self._worker(self._runner.grow)
        except BaseException:
            self.param_groups.pop()
            raise
        self._refresh_handle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters from a `state_dict()`, whose handle must be that of this store at this step.

        The state itself is not in the dict: it is in the store. Raises StateError for another store or step, or other
        groups, CommandError for scalars out of range; nothing was changed then.
        """
        self._check_open()
        given = self._prepare(state_dict)
        states = list(given["state"].values())
        known = bool(states) or not self._optimizer_state.flat.tensors
        if not known or not all(isinstance(state, Mapping) and {_IDENTITY, _STEP} <= state.keys() for state in states):
            raise StateError(
                f"state_dict must come from a {type(self).__name__} (it holds a handle to the state file), not from "
                "another optimizer; use load_full_state_dict for that"
            )
        commits = self._optimizer_state.store.steps
        for state in states:
            for name, key, mine in (("identity", _IDENTITY, self._identity), ("step", _STEP, commits)):
                if state[key] != mine:
                    raise StateError(
                        f"state_dict must be of {name} {mine!r} as in {self.store.path}, not {state[key]!r}; "
                        "`restore` a snapshot of that step first, or open the state file that belongs to it"
                    )
        self._take_groups(given)

    def _prepare(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Run torch's hooks on a state to load, and check it. Raises StateError, CommandError where it does not fit.

        What it has of each group is checked as at construction.
        """
        given = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := hook(self, given)) is not None:
                given = dict(changed)
        if missing := [key for key in ("state", "param_groups") if key not in given]:
            raise StateError(f"state_dict must have {' and '.join(missing)}, as `state_dict()` gives it")
        mine, theirs = self.param_groups, given["param_groups"]
        if not isinstance(theirs, Sequence) or any(
            not isinstance(group.get("params", ()), Sequence) for group in theirs if isinstance(group, Mapping)
        ):
            raise StateError("param_groups of state_dict must be a list of groups, with lists of parameters")
        for index, (own_group, other) in enumerate(zip_longest(mine, theirs)):
            counts = [
                len(group.get("params", ())) if isinstance(group, Mapping) else None for group in (own_group, other)
            ]
            if counts[0] != counts[1]:
                raise StateError(
                    f"param_groups of state_dict must be {len(mine)} groups as the optimizer's, with {counts[0] or 0} "
                    f"parameters in group {index}, not {len(theirs)} groups with {counts[1] or 0}: construct the "
                    "optimizer with the groups of that run"
                )
            self._check_rule(other, step=1)
        return given

    def _take_groups(self, given: dict[str, Any]) -> None:
        """Hyper-parameters of a state dict that was checked, and torch's hooks after it; names of tensors stay."""
        theirs = [
            {key: value for key, value in group.items() if key != "param_names"} for group in given["param_groups"]
        ]
        hooks = self._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()  # they were called
        try:
            super().load_state_dict(given | {"state": {}, "param_groups": theirs})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks
            self._refresh_handle()

    # Mixed precision, accumulation

    @property
    def loss_scale(self) -> float:
        """Factor for the loss: 1 without the option `loss_scale`."""
        scale = self._runner.loss_scale
        return 1.0 if scale is None else scale.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times `loss_scale`: call backward on this."""
        self._check_acquired()
        return loss * self.loss_scale

    def accumulating(self) -> AbstractContextManager[None]:
        """For backward passes that others of the same step follow, as DistributedDataParallel.no_sync.

        Needed with overlap="backward" only, and there only for speed: what began too early is done again.
        """
        self._check_acquired()
        return self._runner.accumulating()

    # State

    @property
    def steps(self) -> int:
        """Committed steps."""
        state = self._optimizer_state
        return state.store.steps - state.uncounted

    @property
    def metadata(self) -> dict[str, Any]:
        """Values of the training script, to change in place: committed with each step, there after a resume.

        What `nearflash.storage.state.metadata` keeps comes back equal; a step raises FormatError for anything else.
        """
        return self._runner.metadata

    @property
    def store(self) -> OptimizerStore:
        """The state on flash: status, verify, snapshot, export."""
        return self._store

    @property
    def report(self) -> Report:
        """Traffic, stalls, timeline, gradient norm, skipped steps, mispredictions."""
        return self._report

    def delta(self, since: int) -> WeightDelta:
        """The weights' new words since step `since`: exact, merged over steps, the last value of each word.

        Needs the option `delta_bytes`. Raises StateError where a step after `since` is not kept any more, or others
        changed the weights after it (`accept_parameters`, a state that was loaded).
        """
        self._check_open()
        return self._worker(lambda: self._optimizer_state.delta(since))

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` as torch.optim has it, the whole state in memory (nearflash.training.step.full_state)."""
        self._check_open()
        self._check_parameters()
        state = self._optimizer_state
        return super().state_dict() | {"state": self._worker(lambda: full_state(state.flat, state.store))}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make what `full_state_dict`, or torch's optimizer of the same kind, gave the state of the next step.

        Parameters are the tensors' present ones, so load the model first (`master` parameters are in the dict).
        Raises StateError, ShapeError, FormatError, CommandError for what does not fit; nothing was changed then.
        """
        self._check_open()
        self._check_parameters()
        given = self._prepare(state_dict)
        state = by_place(given)
        self._worker(lambda: self._runner.load(state))
        self._take_groups(given)

    @torch.no_grad()
    def accept_parameters(self) -> None:
        """Go on from the tensors' present values, which the script changed after a step (clamped, averaged, loaded).

        Durable at once; moments and step counts stay, and `steps` does not count it. Call it after each change.
        Raises StateError, StorageFullError; nothing was changed then.
        """
        self._check_open()
        self._worker(self._runner.accept_parameters)
        self._refresh_handle()

    @torch.no_grad()
    def restore(self, snapshot: str | Path | Sequence[str | Path]) -> int:
        """Be at the step of a snapshot, in store, tensors and `metadata`; returns the step.

        snapshot: the folder that `store.snapshot` was given, or its files; they stay as they are. `param_groups` are
        not in it: `load_state_dict` takes those of that step. What was trained since is gone. Needs room for a copy.
        Raises StateError, StorageFullError; nothing was changed then.
        """
        self._check_open()
        self._check_parameters()
        with StateStore.open(snapshot_files(snapshot), direct=self._settings.direct) as source:
            self._worker(lambda: self._runner.restore(source))
        self._refresh_handle()
        return self.steps

    @torch.no_grad()
    def rollback(self) -> None:
        """Undo the last step, exactly and durably, in store and tensors: until the next one begins.

        Raises StateError where the step before is not there any more; nothing was changed then.
        """
        self._check_open()
        self._worker(self._runner.rollback)
        self._refresh_handle()

    def release(self, *, parameters: bool = False, unlock: bool = False) -> None:
        """Give devices, their memory, staging and scratch back while nothing is trained; `acquire` takes them again.

        State on flash stays as committed, its files locked. Until `acquire` every call but `close`, `zero_grad` and the
        readings `steps`, `metadata` and `report` raises StateError. Gradients in `p.grad` stay: an accumulation goes
        on after `acquire`.
        parameters: the memory of tensors with state, too, which hold NaN until `acquire` reads them from the store.
        unlock: other processes may open the files meanwhile; where one changes them `acquire` raises StateError.

        Raises StateError for gradients that free_gradients holds, and with `parameters` where others changed these;
        nothing was given back then.
        """
        self._check_open()
        self._worker(lambda: self._runner.release(parameters=parameters, unlock=unlock))

    @torch.no_grad()
    def acquire(self) -> None:
        """Take what `release` gave back again, and go on as if nothing had been.

        Raises StateError where the optimizer is not released, or, with `unlock`, the files are in use or changed by
        another process; StorageFullError, and what `open_device` raises. It stays released then.
        """
        if not self._runner.released:
            self._check_open()
            raise StateError("the optimizer must be released for acquire(), not acquired already")
        self._worker(self._runner.acquire)

    def close(self) -> None:
        """Close the store, free device memory, and close the devices that the optimizer opened."""
        if not self._optimizer_state.closed:
            self._worker(self._close)
        self._worker.close()

    def _close(self) -> None:
        self._runner.detach()
        self._optimizer_state.close()

    @property
    def _optimizer_state(self) -> OptimizerState:
        assert self._opened is not None, "torch's constructor has returned"
        return self._opened

    @property
    def _identity(self) -> int:
        return int(self.store.identity, 16)

    def _refresh_handle(self) -> None:
        """Make `state` what the store's is; `_shown` is a copy, to tell edits by."""
        state, identity = self._optimizer_state, self._identity
        self._shown: dict[int, dict[str, int]] | None = None  # where an interrupt ends this, the next check goes on
        self.state.clear()
        for tensor, updates in zip(state.flat.tensors, state.store.tensor_steps, strict=True):
            self.state[tensor] = {"step": updates, _IDENTITY: identity, _STEP: state.store.steps}
        self._shown = {id(tensor): dict(entry) for tensor, entry in self.state.items()}
