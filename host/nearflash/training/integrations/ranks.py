"""Data-parallel ranks that share the optimizer: each updates its own tensors beside its own devices.

    model = DistributedDataParallel(model)
    optimizer = RankedOptimizer(model.parameters(), path=f"/nvme{rank}/state", lr=1e-3, max_grad_norm=1.0)

Every rank has all gradients, averaged, when backward has ended. A tensor belongs to one rank, which keeps its state,
updates it and broadcasts it; the norm is of all tensors, on every rank. So results are, to the bit, those of one rank
with the same averaged gradients. `state`, `param_groups` and `state_dict` are of all tensors, the same on every rank.

Contract: a step is done on all ranks or on none. Where one fails, the others roll back and all raise. After a crash
ranks differ by one step at most, and resume from the smaller one. Without a process group there is one rank. A tensor
takes part in a step where any rank has its gradient, as with DistributedDataParallel(find_unused_parameters=True);
ranks without it then receive it.

Limits: overlap="backward" is rejected, as gradients are not averaged yet when they come. Compression chooses gradients
range by range of a rank's own tensors, so with it the results depend on the number of ranks.

Source: ZeRO stage 1 (Rajbhandari et al. 2020); torch.distributed.optim.ZeroRedundancyOptimizer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed

from nearflash.abi.errors import CommandError, StateError
from nearflash.training.integrations.process_group import Ranks
from nearflash.training.integrations.rank_gradients import agree_on_gradients, agree_on_norm
from nearflash.training.integrations.run_files import Share, agree_on_files
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.optimizer import HANDLE, NearStorageOptimizer
from nearflash.training.optimizers.store import OptimizerStore
from nearflash.training.step.full_state import MASTER, by_place
from nearflash.training.step.report import Report

__all__ = ["RankedOptimizer", "assign_ranks"]

_OWN = ("params", "param_names")
"""Of a group, what each rank has a part of; the rest is the same on all."""
_SCALER = ("grad_scale", "found_inf")
"""What torch.amp.GradScaler sets for a step."""


def assign_ranks(sizes: Sequence[int], ranks: int, load: Sequence[int] = ()) -> list[int]:
    """Rank of each tensor: the largest ones first, each to the rank that has the fewest elements.

    load: elements that each rank has already.
    """
    loads, assigned = [(load[rank] if load else 0, rank) for rank in range(ranks)], [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        elements, rank = min(loads)
        assigned[index], loads[rank] = rank, (elements + max(sizes[index], 1), rank)
    return assigned


class RankedOptimizer(torch.optim.Optimizer):
    """A near-storage optimizer of class `kind` over all ranks of the process group `group`; made on each of them.

    params: as the optimizer's, in the same order on every rank. path, device and the rest of `options` are those of
    this rank's share. Schedulers and clipping see all parameters here. Raises as `kind`, CommandError where there are
    fewer tensors than ranks, and StateError where the files are not those of all ranks of one run.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        kind: type[NearStorageOptimizer] = NearStorageAdamW,
        group: distributed.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if options.get("overlap", "step") != "step":
            raise CommandError(f"overlap must be 'step' with ranks, not {options['overlap']!r}: leave it out")
        self._ranks = Ranks(group)
        self._rank_of: dict[torch.Tensor, int] = {}
        self._opened: NearStorageOptimizer | None = None
        self._closed, self._total = False, 0.0
        super().__init__(params, {})
        if len(self._rank_of) < self._ranks.count:
            raise CommandError(
                f"ranks must be at most {len(self._rank_of)}, one a tensor, not {self._ranks.count}; use fewer ranks"
            )
        self.share, made = agree_on_files(self._ranks, options)
        """Which part of which run this rank has."""
        self._opened = self._ranks.together(
            lambda: kind(self._local_groups(), sum_of_squares=lambda _: self._total, **options),
            "opening",
            undo=lambda opened: _discard(opened, made),
        )
        self.metadata: dict[str, Any] = {}
        """See NearStorageOptimizer.metadata: each rank's is committed with its own state."""
        self.defaults = dict(self.local.defaults)
        self._groups_from_local()
        self._align()
        self._follow(self._rank_of)

    @property
    def local(self) -> NearStorageOptimizer:
        """This rank's optimizer."""
        assert self._opened is not None, "it is opened in the constructor"
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
        if not (active := agree_on_gradients(self._ranks, list(self._rank_of))):
            return loss
        self._total = agree_on_norm(self._ranks, active)
        before = self.local.steps
        self._ranks.together(
            lambda: self._local_step(before),
            "stepping",
            undo=lambda _: self.local.rollback() if self.local.steps > before else None,
        )
        if self.local.steps > before:
            self._broadcast(active)
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `kind`'s, on all ranks together: they share the new tensors out, too. Raises as there."""
        super().add_param_group(param_group)
        tensors, load = list(dict.fromkeys(self.param_groups[-1]["params"])), [0] * self._ranks.count
        for tensor, rank in self._rank_of.items():
            load[rank] += max(tensor.numel(), 1)
        chosen = assign_ranks([tensor.numel() for tensor in tensors], self._ranks.count, load)
        added = dict(zip(tensors, chosen, strict=True))
        self._rank_of |= added
        if self._opened is None:
            return
        try:
            self._ranks.together(
                lambda: self.local.add_param_group(self._local_groups()[-1]),
                "adding a group",
                undo=lambda _: self.close(),
            )
        except BaseException:
            self.param_groups.pop()
            for tensor in added:
                del self._rank_of[tensor]
            raise
        self._groups_from_local()
        self._follow(added)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters from a `state_dict()`, of any rank: its handles must be those of these stores now.

        Raises StateError for other stores, or another step.
        """
        check = self.register_load_state_dict_pre_hook(lambda _, given: self._without_handles(given))
        try:  # after the hooks that the caller has registered
            super().load_state_dict(state_dict)
        finally:
            check.remove()
            self._refresh_from_handles()

    # State

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state as torch.optim has it, in memory, on every rank: for any other number of ranks to load."""
        mine = self._ranks.together(self.local.full_state_dict, "reading")["state"]
        rules = [self.local.rule(group, step=1) for group in self.param_groups]
        names = ["step", MASTER, *sorted({name for rule in rules for name in rule.torch_names.values()})]
        local = {tensor: index for index, tensor in enumerate(self._local_tensors())}
        local_states = [mine.get(local.get(tensor, -1), {}) for tensor in self._rank_of]
        held = self._ranks.gather([name in values for values in local_states for name in names])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, (tensor, rank) in enumerate(self._rank_of.items()):
            there = held[rank][index * len(names) : (index + 1) * len(names)]
            for name in (name for name, has in zip(names, there, strict=True) if has):
                value = local_states[index].get(name)
                if value is None:
                    value = torch.empty(() if name == "step" else tensor.shape, dtype=torch.float32, device="cpu")
                self._ranks.broadcast(value, rank)
                state.setdefault(index, {})[name] = value
        return super().state_dict() | {"state": state}

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `full_state_dict` of any number of ranks, or torch's optimizer; see NearStorageOptimizer's."""
        share = self._ranks.together(lambda: self._share_of(state_dict), "loading")
        self._ranks.together(
            lambda: self.local.load_full_state_dict(share), "loading", undo=lambda _: self.local.rollback()
        )
        super().load_state_dict(state_dict | {"state": {}})
        self._follow(self._rank_of)

    def rollback(self) -> None:
        """See NearStorageOptimizer.rollback: on all ranks together.

        Where it fails on some ranks only they are a step apart, and the next opening aligns them.
        """
        self._ranks.together(self.local.rollback, "rolling back", undo=lambda _: self.close())
        self._follow(self._rank_of)

    @torch.no_grad()
    def accept_parameters(self) -> None:
        """See NearStorageOptimizer.accept_parameters: on all ranks together; each tensor's values are its rank's.

        Where it fails on some ranks only, the optimizer is closed.
        """
        self._check()
        self._ranks.together(self.local.accept_parameters, "accepting parameters", undo=lambda _: self.close())
        self._follow(self._rank_of)

    def __getstate__(self) -> dict[str, Any]:
        return self.local.__getstate__()

    def close(self) -> None:
        """See NearStorageOptimizer.close."""
        self._closed = True
        self.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Opening

    def _align(self) -> None:
        """Ranks that are a step ahead, as a crash came between, roll back."""
        steps = [steps for (steps,) in self._ranks.gather([self.local.steps])]
        if max(steps) - min(steps) > 1:
            self.close()
            raise StateError(f"ranks must be at the same step, or one apart, not at {steps}; open files of one run")
        self._ranks.together(lambda: self.local.rollback() if self.local.steps > min(steps) else None, "rolling back")

    # Tensors and groups

    def _local_tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, rank in self._rank_of.items() if rank == self._ranks.rank]

    def _local_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with this rank's tensors only, under the names that they have among all."""
        groups = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names", [f"{number}.{i}" for i in range(len(group["params"]))])
            mine = [i for i, tensor in enumerate(group["params"]) if self._rank_of[tensor] == self._ranks.rank]
            parts = {"params": [group["params"][i] for i in mine], "param_names": [names[i] for i in mine]}
            groups.append(group | parts)
        return groups

    def _groups_from_local(self) -> None:
        for mine, every in zip(self.local.param_groups, self.param_groups, strict=True):
            every.update({key: value for key, value in mine.items() if key not in _OWN})

    def _follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Bring `tensors`, `state` and `metadata` to what the stores have now."""
        self._broadcast(tensors)
        self._refresh()
        self.metadata = Share.split(self.local.metadata)[1]

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._ranks.broadcast(tensor.data, self._rank_of[tensor])

    def _check(self) -> None:
        """Raise StateError after close, and for groups or state that others edited."""
        if self._closed:
            raise StateError("the optimizer must be open, not closed: construct it again with the same path to go on")
        given = [list(map(id, dict.fromkeys(group["params"]))) for group in self.param_groups]
        if given != self._layout:
            raise StateError(
                'group["params"] must be the tensors that the optimizer was constructed with, in their groups, not '
                "edited: use add_param_group, or construct a new optimizer, on another path"
            )
        held = {tensor: handle for tensor, handle in self.state.items() if handle}
        plain = all(type(value) is int for handle in held.values() for value in handle.values())
        if not plain or held != self._handles:
            raise StateError(
                "state must be changed by this optimizer only, as it holds handles to what is on flash: use "
                "load_full_state_dict, or construct a new optimizer, on another path"
            )

    # Handles, and the state as torch has it

    def _refresh(self) -> None:
        """Make `state` the handles of all tensors that have state, on every rank."""
        mine = [self.local.state.get(tensor, {}) for tensor in self._rank_of]
        words = self._ranks.gather(
            [word for handle in mine for word in (bool(handle), *(handle.get(name, 0) for name in HANDLE))]
        )
        size = 1 + len(HANDLE)
        self._handles: dict[torch.Tensor, dict[str, int]] = {}
        for index, (tensor, rank) in enumerate(self._rank_of.items()):
            there, *values = words[rank][index * size : (index + 1) * size]
            if there:
                self._handles[tensor] = dict(zip(HANDLE, values, strict=True))
        self._layout = [list(map(id, dict.fromkeys(group["params"]))) for group in self.param_groups]
        self._refresh_from_handles()

    def _refresh_from_handles(self) -> None:
        self.state.clear()
        self.state.update({tensor: dict(handle) for tensor, handle in self._handles.items()})

    def _without_handles(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The dict with no state, once its handles are those of the stores now. Raises StateError."""
        if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise StateError(f"state_dict must have {' and '.join(missing)}, as `state_dict()` gives it")
        given = by_place(state_dict)
        wanted = {index: self._handles.get(tensor, {}) for index, tensor in enumerate(self._rank_of)}
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

    def _share_of(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's share of a full state dict, for its own optimizer. Raises StateError for what does not fit."""
        if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
            raise StateError(f"state_dict must have {' and '.join(missing)}, as `full_state_dict()` gives it")
        sizes = [
            [len(group["params"]) for group in groups] for groups in (self.param_groups, state_dict["param_groups"])
        ]
        given = by_place(state_dict)
        if sizes[0] != sizes[1] or not given.keys() <= set(range(len(self._rank_of))):
            raise StateError(
                f"state_dict must be of groups of {sizes[0]} tensors, as this optimizer's, not of {sizes[1]} (with "
                f"state of {list(state_dict['state'])}): construct the optimizer as for the run that it is of"
            )
        indices = [index for index, rank in enumerate(self._rank_of.values()) if rank == self._ranks.rank]
        state = {local_index: given[index] for local_index, index in enumerate(indices) if index in given}
        groups = [
            {key: value for key, value in theirs.items() if key not in _OWN}
            | {key: mine[key] for key in _OWN if key in mine}
            for mine, theirs in zip(self.local.state_dict()["param_groups"], state_dict["param_groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}


def _discard(opened: NearStorageOptimizer, files: Sequence[Path]) -> None:
    """Close an optimizer and remove the files that it made, as other ranks made none."""
    opened.close()
    for path in files:
        if path.is_file():
            path.unlink()
