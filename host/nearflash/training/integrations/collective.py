"""Optimizers of several ranks: each rank has its own store, and all step together or none.

Contract: a step is done on all ranks or on none. Where one fails, the others roll back and all raise. After a crash
ranks differ by one step at most, and resume from the smaller one. Without a process group there is one rank.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from nearflash.abi.errors import CommandError, StateError
from nearflash.support.closing import Closing
from nearflash.training.integrations.process_group import Ranks
from nearflash.training.integrations.run_files import Share, agree_on_files
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.optimizers.store import OptimizerStore
from nearflash.training.step.full_state import by_place
from nearflash.training.step.report import Report

__all__ = ["CollectiveOptimizer", "name_parameters"]

_OWN = ("params", "param_names")
"""Of a group, what each rank has a part of; the rest is the same on all."""
_SCALER = ("grad_scale", "found_inf")
"""What torch.amp.GradScaler sets for a step."""


class CollectiveOptimizer(Closing, torch.optim.Optimizer):
    """An optimizer of parameters that ranks share, over one local optimizer on each; subclasses state who has what."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], group: distributed.ProcessGroup | None, options: dict[str, Any]) -> None:
        if options.get("overlap", "step") != "step":
            raise CommandError(f"overlap must be 'step' with ranks, not {options['overlap']!r}: leave it out")
        self._ranks = Ranks(group)
        self._opened: NearStorageOptimizer | None = None
        self._closed, self._total, self._unlocked = False, 0.0, False
        self._handles: dict[torch.Tensor, dict[str, int]] = {}
        self.metadata: dict[str, Any] = {}
        """See NearStorageOptimizer.metadata: each rank's is committed with its own state."""
        super().__init__(params, {})

    def _open(self, kind: type[NearStorageOptimizer], options: dict[str, Any]) -> None:
        """Open this rank's optimizer, with the others."""
        self.share, made = agree_on_files(self._ranks, options)
        """Which part of which run this rank has."""
        self._opened = self._ranks.together(
            lambda: kind(self._local_groups(), sum_of_squares=lambda _: self._total, **options),
            "opening",
            undo=lambda opened: _discard(opened, made),
        )
        self.defaults = dict(self.local.defaults)
        self._groups_from_local()
        self._align()
        self._follow(self._tensors)

    # Of the subclass

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        """All parameters, each once, in order."""
        raise NotImplementedError

    def _local_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with this rank's tensors only, under the names that they have among all."""
        raise NotImplementedError

    def _agree(self) -> list[torch.Tensor]:
        """Parameters of this step, on all ranks; sets `_total`, the sum of squares of all gradients."""
        raise NotImplementedError

    def _share_values(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the values that its tensors have after a step."""
        raise NotImplementedError

    def _collect_handles(self) -> dict[torch.Tensor, dict[str, int]]:
        """Handles of all parameters that have state, on every rank."""
        raise NotImplementedError

    @property
    def local(self) -> NearStorageOptimizer:
        """This rank's optimizer."""
        if self._opened is None:
            raise StateError("the optimizer must have opened its files: call prepare() on every rank first")
        return self._opened

    # As one rank's optimizer

    @property
    def steps(self) -> int:
        """Committed steps, the same on every rank."""
        return self.local.steps

    @property
    def report(self) -> Report:
        """Traffic, stalls and timeline of this rank; the gradient norm is that of all tensors."""
        return self.local.report

    @property
    def store(self) -> OptimizerStore:
        """This rank's state on flash."""
        return self.local.store

    @property
    def loss_scale(self) -> float:
        """See NearStorageOptimizer.loss_scale: the same on every rank."""
        return self.local.loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times `loss_scale`: call backward on this."""
        return self.local.scale_loss(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """See NearStorageOptimizer.accumulating; DistributedDataParallel.no_sync is what saves time here."""
        return self.local.accumulating()

    # torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's, on all ranks together. Raises on all of them where one fails; then nothing was done."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ranks.together(self._check, "stepping")
        if not (active := self._agree()):
            return loss
        before = self.local.steps
        self._ranks.together(
            lambda: self._local_step(before),
            "stepping",
            undo=lambda _: self.local.rollback() if self.local.steps > before else None,
        )
        if self.local.steps > before:
            self._share_values(active)
            self._refresh()
        return loss

    def _local_step(self, before: int) -> None:
        for mine, every in zip(self.local.param_groups, self.param_groups, strict=True):
            for key in mine.keys() - every.keys() - set(_OWN):
                del mine[key]
            mine.update({key: value for key, value in every.items() if key not in _OWN})
        self.local.metadata.clear()
        self.local.metadata.update(self.share.join(self.metadata))
        for name in _SCALER:
            setattr(self.local, name, getattr(self, name, None))
        try:
            self.local.step()
        except BaseException:
            if self.local.steps > before:
                with suppress(StateError):  # then the next opening aligns the ranks
                    self.local.rollback()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's: hyper-parameters, and handles to the stores."""
        self._check_acquired()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters from a `state_dict()`, of any rank: its handles must be those of these stores now.

        Raises StateError for other stores, or another step.
        """
        self._check_acquired()
        check = self.register_load_state_dict_pre_hook(lambda _, given: self._without_handles(given))
        try:  # after the hooks that the caller has registered
            super().load_state_dict(state_dict)
        finally:
            check.remove()
            self._refresh_from_handles()

    # State

    def rollback(self) -> None:
        """See NearStorageOptimizer.rollback: on all ranks together.

        Where it fails on some ranks only they are a step apart, and the next opening aligns them.
        """
        self._ranks.together(self.local.rollback, "rolling back", undo=lambda _: self.close())
        self._follow(self._tensors)

    @torch.no_grad()
    def accept_parameters(self) -> None:
        """See NearStorageOptimizer.accept_parameters: on all ranks together; each tensor's values are its rank's.

        Where it fails on some ranks only, the optimizer is closed.
        """
        self._check()
        self._ranks.together(self.local.accept_parameters, "accepting parameters", undo=lambda _: self.close())
        self._follow(self._tensors)

    def snapshot(self, folder: str | Path, *, replacing: bool = False) -> list[Path]:
        """Files of the last committed step in `folder`/rank<r>, on all ranks together; returns this rank's.

        Raises as OptimizerStore.snapshot.
        """
        own = Path(folder) / f"rank{self._ranks.rank}"
        return self._ranks.together(lambda: self.store.snapshot(own, replacing=replacing), "saving")

    @torch.no_grad()
    def restore(self, folder: str | Path) -> int:
        """Be at the step of a `snapshot` of as many ranks; returns the step. See NearStorageOptimizer.restore.

        Where it fails on some ranks only, the optimizer is closed.
        """
        self._check()
        own = Path(folder) / f"rank{self._ranks.rank}"
        self._ranks.together(lambda: self.local.restore(own), "restoring", undo=lambda _: self.close())
        self._align()
        self._follow(self._tensors)
        return self.steps

    def release(self, *, parameters: bool = False, unlock: bool = False) -> None:
        """See NearStorageOptimizer.release: on all ranks together; the parameters stay in memory, as ranks share them.

        Raises CommandError for `parameters`.
        """
        if parameters:
            raise CommandError(
                "parameters must be False with ranks, not True: their memory is the engine's; have that offload them"
            )
        self._check()
        self._unlocked = unlock
        self._ranks.together(
            lambda: self.local.release(unlock=unlock), "releasing", undo=lambda _: self.local.acquire()
        )

    def acquire(self) -> None:
        """See NearStorageOptimizer.acquire: on all ranks together, or all stay released."""
        self._ranks.together(self.local.acquire, "acquiring", undo=lambda _: self.local.release(unlock=self._unlocked))

    def __getstate__(self) -> dict[str, Any]:
        return self.local.__getstate__()

    def close(self) -> None:
        """See NearStorageOptimizer.close."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()

    # Opening

    def _agree_on_layout(self) -> None:
        """Raise StateError, on all ranks, where their parameters are not the same: names, shapes, dtypes, groups."""
        described = [
            [(name, (*one.shape,), str(one.dtype))
             for name, one in zip(name_parameters(group, number), group["params"], strict=False)]
            for number, group in enumerate(self.param_groups)
        ]  # fmt: skip
        digest = hashlib.sha256(repr(described).encode()).digest()
        digests = self._ranks.gather(struct.unpack("<4Q", digest))
        if others := [rank for rank, found in enumerate(digests) if found != digests[0]]:
            raise StateError(
                f"parameters must be the same on every rank, in names, shapes, dtypes and groups, but those of ranks "
                f"{others} are not rank 0's: make the model and its groups by the same code on each"
            )

    def _align(self) -> None:
        """Ranks that are a step ahead, as a crash came between, roll back."""
        steps = [steps for (steps,) in self._ranks.gather([self.local.steps])]
        if max(steps) - min(steps) > 1:
            self.close()
            raise StateError(f"ranks must be at the same step, or one apart, not at {steps}; open files of one run")
        self._ranks.together(lambda: self.local.rollback() if self.local.steps > min(steps) else None, "rolling back")

    # Tensors, groups, handles

    def _groups_from_local(self) -> None:
        for mine, every in zip(self.local.param_groups, self.param_groups, strict=True):
            every.update({key: value for key, value in mine.items() if key not in _OWN})

    def _read_full(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """State of a full state dict by parameter. Raises StateError for one of other groups."""
        if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise StateError(f"state_dict must have {' and '.join(missing)}, as `full_state_dict()` gives it")
        sizes = [
            [len(group["params"]) for group in groups] for groups in (self.param_groups, state_dict["param_groups"])
        ]
        given = by_place(state_dict)
        if sizes[0] != sizes[1] or not given.keys() <= set(range(len(self._tensors))):
            raise StateError(
                f"state_dict must be of groups of {sizes[0]} tensors, as this optimizer's, not of {sizes[1]} (with "
                f"state of {list(state_dict['state'])}): construct the optimizer as for the run that it is of"
            )
        return given

    def _local_param_groups(self, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Hyper-parameters of a full state's groups, for the local optimizer's tensors."""
        return [
            {key: value for key, value in theirs.items() if key not in _OWN}
            | {key: mine[key] for key in _OWN if key in mine}
            for mine, theirs in zip(self.local.state_dict()["param_groups"], given, strict=True)
        ]

    def _add_local_group(self) -> None:
        """Give the last group's part to the local optimizer, on all ranks together."""
        self._ranks.together(
            lambda: self.local.add_param_group(self._local_groups()[-1]),
            "adding a group",
            undo=lambda _: self.close(),
        )
        self._groups_from_local()

    def _load_share(self, state: dict[int, dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """Load this rank's part, `state`, of a full state, on all ranks together, and its hyper-parameters."""

        def load() -> None:
            groups = self._local_param_groups(state_dict["param_groups"])
            self.local.load_full_state_dict({"state": state, "param_groups": groups})

        self._ranks.together(load, "loading", undo=lambda _: self.local.rollback())
        self._load_groups(state_dict)
        self._follow(self._tensors)

    def _load_groups(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters of a full state, by torch's own way."""
        super().load_state_dict(state_dict | {"state": {}})

    def _follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Bring `tensors`, `state` and `metadata` to what the stores have now."""
        self._share_values(tensors)
        self._refresh()
        self.metadata = Share.split(self.local.metadata)[1]

    def _refresh(self) -> None:
        """Make `state` the handles of all tensors that have state, on every rank."""
        self._handles = self._collect_handles()
        self._layout: list[list[int]] = [list(map(id, dict.fromkeys(group["params"]))) for group in self.param_groups]
        self._refresh_from_handles()

    def _check(self) -> None:
        """Raise StateError after close, and for groups or state that others edited."""
        if self._closed:
            raise StateError("the optimizer must be open, not closed: construct it again with the same path to go on")
        self._check_acquired()
        given = [list(map(id, dict.fromkeys(group["params"]))) for group in self.param_groups]
        if given != self._layout:
            raise StateError(
                'group["params"] must be the tensors that the optimizer opened its files with, in their groups, not '
                "edited: shard the model before, use add_param_group, or construct a new optimizer, on another path"
            )
        held = {tensor: handle for tensor, handle in self.state.items() if handle}
        plain = all(type(value) is int for handle in held.values() for value in handle.values())
        if not plain or held != self._handles:
            raise StateError(
                "state must be changed by this optimizer only, as it holds handles to what is on flash: use "
                "load_full_state_dict, or construct a new optimizer, on another path"
            )

    def _check_acquired(self) -> None:
        if self._opened is not None:
            self._opened._check_acquired()

    def _refresh_from_handles(self) -> None:
        self.state.clear()
        self.state.update({tensor: dict(handle) for tensor, handle in self._handles.items()})

    def _without_handles(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The dict with no state, once its handles are those of the stores now. Raises StateError."""
        if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise StateError(f"state_dict must have {' and '.join(missing)}, as `state_dict()` gives it")
        given = by_place(state_dict)
        wanted = {index: self._handles.get(tensor, {}) for index, tensor in enumerate(self._tensors)}
        if not given or any(
            not state or wanted.get(index, {}).keys() != state.keys() for index, state in given.items()
        ):
            raise StateError(
                f"state_dict must come from a {type(self).__name__} (it holds handles to the state files), not from "
                "another optimizer; use load_full_state_dict for that"
            )
        for index, state in given.items():
            for key, mine in wanted[index].items():
                if int(state[key]) != mine:
                    raise StateError(
                        f"state_dict must be of {key.removeprefix('nearflash_')} {mine} as in the open state files "
                        f"(tensor {index}), not {state[key]!r}; open the state files that belong to it"
                    )
        return state_dict | {"state": {}}


def name_parameters(group: Mapping[str, Any], number: int) -> list[str]:
    """Names of the parameters of a group, the `number`-th, those that it states or their places."""
    return list(group.get("param_names", [f"{number}.{index}" for index in range(len(group["params"]))]))


def _discard(opened: NearStorageOptimizer, files: Sequence[Path]) -> None:
    """Close an optimizer and remove the files that it made, as other ranks made none."""
    opened.close()
    for path in files:
        if path.is_file():
            path.unlink()
