"""Data-parallel ranks that share the optimizer: each updates its own tensors beside its own devices.

    model = DistributedDataParallel(model)
    optimizer = RankedOptimizer(model.parameters(), path=f"/nvme{rank}/state", lr=1e-3, max_grad_norm=1.0)

Every rank has all gradients, averaged, when backward has ended. A tensor belongs to one rank, which keeps its state,
updates it and broadcasts it; the norm is of all tensors, on every rank. So results are, to the bit, those of one rank
with the same averaged gradients.

Contract: a step is done on all ranks or on none. Where one fails, the others roll back and all raise. After a crash
ranks differ by one step at most, and resume from the smaller one. Without a process group there is one rank.

Limits: overlap="backward" is rejected, as gradients are not averaged yet when they come. Compression chooses gradients
range by range of a rank's own tensors, so with it the results depend on the number of ranks.

Source: ZeRO stage 1 (Rajbhandari et al. 2020); torch.distributed.optim.ZeroRedundancyOptimizer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import distributed

from nearflash.abi.errors import CommandError, NonFiniteError, StateError
from nearflash.training.gradients.norm import sum_of_squares
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.full_state import MASTER
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.optimizers.store import OptimizerStore
from nearflash.training.step.report import Report

__all__ = ["RankedOptimizer", "assign_ranks"]


def assign_ranks(sizes: Sequence[int], ranks: int) -> list[int]:
    """Rank of each tensor: the largest ones first, each to the rank that has the fewest elements."""
    load, assigned = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        elements, rank = min(load)
        assigned[index], load[rank] = rank, (elements + max(sizes[index], 1), rank)
    return assigned


class RankedOptimizer(torch.optim.Optimizer):
    """A near-storage optimizer of class `kind` over all ranks of the process group `group`; made on each of them.

    params: as the optimizer's, in the same order on every rank. path, device and the rest of `options` are those of
    this rank's share. Schedulers and clipping see all parameters here. Raises as `kind`, and CommandError where there
    are fewer tensors than ranks.
    """

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
        self._group = group
        there = distributed.is_available() and distributed.is_initialized()
        self._rank, self._ranks = (distributed.get_rank(group), distributed.get_world_size(group)) if there else (0, 1)
        super().__init__(params, {})
        self._tensors = [tensor for one in self.param_groups for tensor in one["params"]]
        self._rank_of = assign_ranks([tensor.numel() for tensor in self._tensors], self._ranks)
        if len(self._tensors) < self._ranks:
            raise CommandError(f"ranks must be at most {len(self._tensors)}, one a tensor, not {self._ranks}")
        squares = partial(self._sum_of_squares, loss_scaled=options.get("loss_scale") is not None)
        self.local = self._on_all_ranks(
            lambda: kind(self._local_groups(), sum_of_squares=squares, **options), "opening"
        )
        """This rank's optimizer."""
        for mine, every in zip(self.local.param_groups, self.param_groups, strict=True):
            every.update({key: value for key, value in mine.items() if key not in ("params", "param_names")})
        self._align()
        self._broadcast_parameters()

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's, on all ranks together. Raises on all of them where one fails; then nothing was done."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, every in zip(self.local.param_groups, self.param_groups, strict=True):
            mine.update({key: value for key, value in every.items() if key not in ("params", "param_names")})
        before = self.local.steps
        self._on_all_ranks(
            self.local.step, "stepping", undo=lambda: self.local.steps > before and self.local.rollback()
        )
        if len(set(self._gather(self.local.steps))) > 1:
            self._align()
            raise StateError("gradients must be there for a tensor of every rank, or for none; use fewer ranks")
        self._broadcast_parameters()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, in the constructor only. Raises StateError later."""
        if hasattr(self, "local"):
            raise StateError("parameter groups must be complete when ranks divide them; pass all to the constructor")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's light handle."""
        return self.local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See NearStorageOptimizer.load_state_dict: on the rank that gave the handle."""
        self.local.load_state_dict(state_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state as torch.optim has it, in memory, on every rank: for any other number of ranks to load."""
        mine = self.local.full_state_dict()["state"]
        names = ["step", MASTER, *(name for array in self.local.store.manifest.arrays if (name := array.torch_name))]
        state: dict[int, dict[str, torch.Tensor]] = {}
        local = {index: place for place, index in enumerate(self._local_indices())}
        for index, tensor in enumerate(self._tensors):
            own = mine.get(local.get(index, -1), {})
            has = torch.tensor([name in own for name in names])
            self._broadcast(has, self._rank_of[index])
            for name in (name for name, there in zip(names, has.tolist(), strict=True) if there):
                shape = () if name == "step" else tensor.shape
                value = own[name].clone() if own else torch.empty(shape)
                self._broadcast(value, self._rank_of[index])
                state.setdefault(index, {})[name] = value
        return super().state_dict() | {"state": state}

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `full_state_dict` of any number of ranks, or torch's optimizer; see NearStorageOptimizer's."""
        state = {
            place: state_dict["state"][index]
            for place, index in enumerate(self._local_indices())
            if index in state_dict["state"]
        }
        groups = self.local.state_dict()["param_groups"]
        merged = [
            theirs | {"params": mine["params"]} for mine, theirs in zip(groups, state_dict["param_groups"], strict=True)
        ]
        self.local.load_full_state_dict({"state": state, "param_groups": merged})
        self._broadcast_parameters()

    def close(self) -> None:
        """See NearStorageOptimizer.close."""
        self.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _local_indices(self) -> list[int]:
        """Of this rank's tensors, in order: which ones they are of all."""
        return [index for index, rank in enumerate(self._rank_of) if rank == self._rank]

    def _local_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with this rank's tensors only."""
        mine, place, groups = set(self._local_indices()), 0, []
        for group in self.param_groups:
            inside = [i for i in range(len(group["params"])) if place + i in mine]
            place += len(group["params"])
            chosen = {name: [group[name][i] for i in inside] for name in ("params", "param_names") if name in group}
            groups.append(group | chosen)
        return groups

    def _sum_of_squares(self, _: Iterable[torch.Tensor], *, loss_scaled: bool) -> float:
        """Of all ranks' tensors, whose gradients every rank has."""
        total = sum_of_squares(tensor.grad for tensor in self._tensors if tensor.grad is not None)
        if not math.isfinite(total) and not loss_scaled:
            raise NonFiniteError("gradients must be finite, not NaN or infinite; nothing was updated: skip this step")
        return total

    def _align(self) -> None:
        """Ranks that are a step ahead, as a crash came between, roll back."""
        steps = self._gather(self.local.steps)
        if max(steps) - min(steps) > 1:
            raise StateError(f"ranks must be at the same step, or one apart, not at {steps}; open files of one run")
        if self.local.steps > min(steps):
            self.local.rollback()

    def _broadcast_parameters(self) -> None:
        for tensor, rank in zip(self._tensors, self._rank_of, strict=True):
            self._broadcast(tensor.data, rank)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self._ranks > 1:
            distributed.broadcast(tensor, group=self._group, group_src=source)

    def _gather(self, value: int) -> list[int]:
        if self._ranks == 1:
            return [value]
        values = torch.zeros(self._ranks, dtype=torch.int64)
        distributed.all_gather_into_tensor(values, torch.tensor([value]), group=self._group)
        return [int(value) for value in values]

    def _on_all_ranks(self, call: Callable[[], Any], doing: str, undo: Callable[[], Any] = lambda: None) -> Any:
        """What `call` gives, once it has worked on every rank; else `undo` here, and raise."""
        result, mine = None, None
        try:
            result = call()
        except BaseException as error:  # of whatever kind: the other ranks wait for this one's word
            mine = error
        failed = [rank for rank, good in enumerate(self._gather(int(mine is None))) if not good]
        if mine is not None:
            raise mine
        if failed:
            undo()
            if isinstance(result, NearStorageOptimizer):
                result.close()
            raise StateError(f"{doing} must work on every rank, and failed on {failed}: see their errors")
        return result
