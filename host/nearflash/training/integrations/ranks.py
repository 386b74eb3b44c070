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

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from nearflash.abi.errors import CommandError
from nearflash.training.integrations.collective import CollectiveOptimizer, name_parameters
from nearflash.training.integrations.rank_gradients import agree_on_gradients, agree_on_norm
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.optimizer import HANDLE, NearStorageOptimizer
from nearflash.training.step.full_state import MASTER

__all__ = ["RankedOptimizer", "assign_ranks"]


def assign_ranks(sizes: Sequence[int], ranks: int, load: Sequence[int] = ()) -> list[int]:
    """Rank of each tensor: the largest ones first, each to the rank that has the fewest elements.

    load: elements that each rank has already.
    """
    loads, assigned = [(load[rank] if load else 0, rank) for rank in range(ranks)], [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        elements, rank = min(loads)
        assigned[index], loads[rank] = rank, (elements + max(sizes[index], 1), rank)
    return assigned


class RankedOptimizer(CollectiveOptimizer):
    """A near-storage optimizer of class `kind` over all ranks of the process group `group`; made on each of them.

    params: as the optimizer's, in the same order on every rank. path, device and the rest of `options` are those of
    this rank's share. Schedulers and clipping see all parameters here. Raises as `kind`, CommandError where there are
    fewer tensors than ranks, and StateError where the files are not those of all ranks of one run.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        kind: type[NearStorageOptimizer] = NearStorageAdamW,
        group: distributed.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._rank_of: dict[torch.Tensor, int] = {}
        super().__init__(params, group, options)
        self._agree_on_layout()
        if len(self._rank_of) < self._ranks.count:
            raise CommandError(
                f"ranks must be at most {len(self._rank_of)}, one a tensor, not {self._ranks.count}; use fewer ranks"
            )
        self._open(kind, options)

    # torch.optim.Optimizer

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
            self._add_local_group()
        except BaseException:
            self.param_groups.pop()
            for tensor in added:
                del self._rank_of[tensor]
            raise
        self._follow(added)

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
        self._load_share(self._ranks.together(lambda: self._share_of(state_dict), "loading"), state_dict)

    # Tensors and groups

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        return list(self._rank_of)

    def _agree(self) -> list[torch.Tensor]:
        active = agree_on_gradients(self._ranks, self._tensors)
        self._total = agree_on_norm(self._ranks, active) if active else 0.0
        return active

    def _local_tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, rank in self._rank_of.items() if rank == self._ranks.rank]

    def _local_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with this rank's tensors only, under the names that they have among all."""
        groups = []
        for number, group in enumerate(self.param_groups):
            names = name_parameters(group, number)
            mine = [i for i, tensor in enumerate(group["params"]) if self._rank_of[tensor] == self._ranks.rank]
            parts = {"params": [group["params"][i] for i in mine], "param_names": [names[i] for i in mine]}
            groups.append(group | parts)
        return groups

    def _share_values(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._ranks.broadcast(tensor.data, self._rank_of[tensor])

    def _collect_handles(self) -> dict[torch.Tensor, dict[str, int]]:
        mine = [self.local.state.get(tensor, {}) for tensor in self._rank_of]
        words = self._ranks.gather(
            [word for handle in mine for word in (bool(handle), *(handle.get(name, 0) for name in HANDLE))]
        )
        size, handles = 1 + len(HANDLE), {}
        for index, (tensor, rank) in enumerate(self._rank_of.items()):
            there, *values = words[rank][index * size : (index + 1) * size]
            if there:
                handles[tensor] = dict(zip(HANDLE, values, strict=True))
        return handles

    def _share_of(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """This rank's state in a full state dict, for its own optimizer. Raises StateError for what does not fit."""
        given = self._read_full(state_dict)
        indices = [index for index, rank in enumerate(self._rank_of.values()) if rank == self._ranks.rank]
        return {local_index: given[index] for local_index, index in enumerate(indices) if index in given}
