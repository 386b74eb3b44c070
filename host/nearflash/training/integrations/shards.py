"""Optimizers of sharded parameters (FSDP2): each rank updates its shards beside its own drives.

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = ShardedOptimizer(model.parameters(), path="/nvme/run", lr=1e-3, max_grad_norm=1.0)

Parameters are DTensors of any mesh, each dimension of it Shard or Replicate, and shards may be uneven or empty; plain
tensors beside them must have the same values and gradients on every rank. A rank's state is in `rank<r>.state` in the
folder `path`, which may be another one on each rank. Nothing crosses between ranks but the sum of squares of their
gradients and whether a step worked. Without a limit of the norm, results are to the bit those of one rank with the
same gradients; with one they differ by how the sum of squares is rounded.

Contract: see nearflash.training.integrations.collective. `state` holds handles, the same on every rank, and is never
empty, so that torch.distributed.checkpoint takes no step to fill it. A checkpoint of any step is
`snapshot`, beside that of the model; for another number of ranks it is `full_state_dict`, whose DTensors
torch.distributed.checkpoint saves and reshards.

Where no parameter is a DTensor yet, as in a script that hands model and optimizer to accelerate, files are opened late:
by `prepare`, by loading a state, or by the first step. Until then the tensors of the groups may be replaced, as
accelerate does with `torch.empty(1)` and then with the shards; afterwards that is refused. DeepSpeed's engine (ZeRO-1
and 2) replaces them by one flat tensor a group, which differs from rank to rank: so fewer elements than there were are
each rank's own part.

Limits: overlap="backward" is rejected. Every rank must have an element of a parameter. A shard must stay in its memory:
move and cast the model before the optimizer is made.

Source: torch.distributed.fsdp.fully_shard; ZeRO stages 2 and 3 (Rajbhandari et al. 2020).
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nearflash.abi.errors import CommandError, FormatError, ShapeError, StateError
from nearflash.storage import TensorEntry
from nearflash.storage.state.ranks import Shard, ShardedState
from nearflash.training.integrations.collective import CollectiveOptimizer, name_parameters
from nearflash.training.integrations.run_files import reshard_on_load
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.optimizer import HANDLE, NearStorageOptimizer
from nearflash.training.step.members import Member
from nearflash.training.step.norm import sum_of_squares
from nearflash.training.step.settings import StepSettings

__all__ = ["ShardedOptimizer", "own_paths"]


_UNOPENED = dict.fromkeys(HANDLE, 0)
"""Handle of a tensor before files are open."""


class ShardedOptimizer(CollectiveOptimizer):
    """A near-storage optimizer of class `kind` over the shards of all ranks of the process group `group`.

    params: as the optimizer's, in the same order on every rank. path: folder of this rank's state file, or one for each
    device. The rest of `options` is of this rank's part. Raises as `kind`, FormatError for a placement that is neither
    Shard nor Replicate, StateError where the files are not those of all ranks of one run.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        kind: type[NearStorageOptimizer] = NearStorageAdamW,
        group: distributed.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if not kind._elementwise:
            raise CommandError(
                f"kind must update elements by themselves, not {kind.__name__}, which needs whole matrices: take "
                "RankedOptimizer with DistributedDataParallel, where each rank has them"
            )
        self._local_of: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(params, group, options)
        if "path" in options:
            options["path"] = own_paths(options["path"], self._ranks.rank)
        self._late = kind, options
        self._elements, self._partitioned = _count_elements(self._tensors), False
        self.defaults = _defaults(kind, options)
        for one in self.param_groups:
            one.update({name: value for name, value in self.defaults.items() if name not in one})
        if any(isinstance(parameter, DTensor) for parameter in self._tensors):
            self.prepare()
        else:
            self._wait()

    def prepare(self) -> None:
        """Open the files, on all ranks together, where that is still to come: once the model was sharded.

        A run that is resumed needs it (or a load of its state) before the first forward pass, as it gives the
        parameters their values. Raises as construction.
        """
        if self._opened is not None:
            return
        if self._closed:
            self._check()
        self._agree_on_layout()
        kind, options = self._late
        for number, group in enumerate(self.param_groups):
            self._view_group(group, number)
        self._partitioned = _count_elements(self._tensors) < self._elements
        held = self.metadata
        if options.get("resume") and isinstance(path := options.get("path"), Path):
            reshard_on_load(self._ranks, path, self._list_entries, bool(options.get("direct", True)))
        self._open(kind, options)
        self.metadata = held | self.metadata

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `kind`'s, on all ranks together. Raises as there."""
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        if self._opened is None:
            return
        try:
            self._view_group(group, number)
            self._add_local_group()
        except BaseException:
            self.param_groups.pop()
            for parameter in group["params"]:
                self._local_of.pop(parameter, None)
            raise
        self._follow(group["params"])

    def state_dict(self) -> dict[str, Any]:
        """As torch's: hyper-parameters, and handles to the stores; of step 0, of no store yet, until they are open."""
        if self._opened is not None:
            return super().state_dict()
        self.state.clear()
        self.state.update({parameter: dict(_UNOPENED) for parameter in self._tensors})
        try:
            return super().state_dict()
        finally:
            self._wait()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See CollectiveOptimizer.load_state_dict. Opens the files, unless the handles are of no store yet."""
        states = state_dict.get("state", {})
        if self._opened is None and states and all(state == _UNOPENED for state in states.values()):
            self._load_groups(state_dict)
            self._wait()
            return
        self.prepare()
        super().load_state_dict(state_dict)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times `loss_scale`, on all ranks together: call backward on this."""
        self._open_for_training()
        return super().scale_loss(loss)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As the optimizer's, on all ranks together. Raises on all of them where one fails; then nothing was done.

        CommandError, too, where a parameter has a gradient on some ranks only, FormatError for a gradient that is not
        sharded as its parameter; StateError where it is this step that opens files of a run that had begun.
        """
        self._open_for_training()
        try:
            return super().step(closure)
        finally:  # zero_grad frees what the parameters have, and must free it all
            for parameter, local in self._local_of.items():
                if local is not parameter:
                    local.grad = None

    # State

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The whole state as torch.optim has it for these parameters: DTensors, of which each rank has its shards."""
        mine = self._ranks.together(self.local.full_state_dict, "reading")["state"]
        state = {
            index: {name: _as_shard(name, value, parameter) for name, value in mine[index].items()}
            for index, parameter in enumerate(self._local_of)
            if index in mine
        }
        return super().state_dict() | {"state": state}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `full_state_dict`, that of torch's optimizer, or whole tensors, the same on every rank.

        See NearStorageOptimizer.load_full_state_dict.
        """
        self.prepare()
        parameters = list(self._local_of)
        given = self._ranks.together(lambda: self._check_full(state_dict), "loading")
        state = {
            index: {name: _own_part(name, value, parameters[index]) for name, value in values.items()}
            for index, values in given.items()
        }
        self._load_share(state, state_dict)

    def restore(self, folder: str | Path) -> int:
        """As `CollectiveOptimizer.restore`; the files are opened before, where that is still to come."""
        self.prepare()
        return super().restore(folder)

    # Parameters and their shards

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        return list(dict.fromkeys(parameter for group in self.param_groups for parameter in group["params"]))

    def _wait(self) -> None:
        """Make `state` not empty without a reference to a tensor: who replaces them wants their memory back."""
        self.state.clear()
        self.state[torch.empty(0)] = dict(_UNOPENED)

    def _open_for_training(self) -> None:
        """Raise StateError where that gives parameters other values than those that the gradients are of."""
        if self._opened is None:
            self.prepare()
            if self.steps:
                raise StateError(
                    f"a run that is resumed, here at step {self.steps}, must be opened before its first forward pass, "
                    "not by its first step; nothing was updated: call prepare() once the model is sharded"
                )

    def _list_entries(self, state: ShardedState) -> list[tuple[str, tuple[int, ...], str]]:
        """(name, shape, dtype) of this rank's shards of what has state there. Raises StateError for another model."""
        members, stored = Member.of(self._local_groups()), state.tensors
        shards = {member.name: Shard.of(TensorEntry(member.name, (*member.tensor.shape,), "", 0)) for member in members}
        every = {shard.name: shard.full_shape for shard in shards.values()}
        for name, (shard, _) in stored.items():
            if every.get(name) != shard.full_shape:
                raise StateError(
                    f"parameters must be those of the run, with {name!r} of {shard.full_shape}: load its model"
                )
        return [(name, shard.shape, stored[shard.name][1]) for name, shard in shards.items() if shard.name in stored]

    def _view_group(self, group: Mapping[str, Any], number: int) -> None:
        named = zip(name_parameters(group, number), group["params"], strict=True)
        self._local_of |= {parameter: _view_local(name, parameter) for name, parameter in named}

    def _local_groups(self) -> list[dict[str, Any]]:
        return [
            group
            | {
                "params": [self._local_of[one] for one in group["params"]],
                "param_names": [
                    _name_shard(name, one)
                    for name, one in zip(name_parameters(group, number), group["params"], strict=True)
                ],
            }
            for number, group in enumerate(self.param_groups)
        ]

    def _agree(self) -> list[torch.Tensor]:
        parameters = list(self._local_of)
        every = self._ranks.gather([parameter.grad is not None for parameter in parameters])
        if uneven := [index for index, there in enumerate(zip(*every, strict=True)) if any(there) and not all(there)]:
            raise CommandError(
                f"parameter {uneven[0]} must have a gradient on every rank or on none, not on some; nothing was "
                "updated: call the same modules on every rank"
            )
        self._ranks.together(self._take_gradients, "stepping")
        counted = (
            local.grad
            for parameter, local in self._local_of.items()
            if local.grad is not None and local.numel() and self._is_counted(parameter)
        )
        self._total = sum(self._ranks.gather_float(sum_of_squares(counted)))
        return [parameter for parameter in parameters if parameter.grad is not None]

    def _take_gradients(self) -> None:
        """Give each shard its gradient. Raises FormatError for one that is sharded otherwise."""
        for index, (parameter, local) in enumerate(self._local_of.items()):
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or gradient is None:
                continue
            if not isinstance(gradient, DTensor) or gradient.placements != parameter.placements:
                raise FormatError(
                    f"gradient of parameter {index} must be sharded as the parameter, {parameter.placements}, not "
                    f"{getattr(gradient, 'placements', 'whole')}; nothing was updated: redistribute it before the step"
                )
            local.grad = gradient.to_local()

    def _is_counted(self, parameter: torch.Tensor) -> bool:
        """Whether this rank's part counts for the norm: of replicas the first one's."""
        if not isinstance(parameter, DTensor):
            return self._partitioned or self._ranks.rank == 0
        place = parameter.device_mesh.get_coordinate() or ()
        return all(at == 0 for at, one in zip(place, parameter.placements, strict=True) if one.is_replicate())

    def _share_values(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: shards are in the parameters' own memory, and replicas of equal gradients are equal."""

    def _collect_handles(self) -> dict[torch.Tensor, dict[str, int]]:
        steps, identity, commits = HANDLE
        state = self.local.state
        return {
            parameter: {steps: state[local][steps], identity: self.share.run, commits: state[local][commits]}
            for parameter, local in self._local_of.items()
            if local in state
        }

    def _check(self) -> None:
        super()._check()
        for index, (parameter, local) in enumerate(self._local_of.items()):
            if isinstance(parameter, DTensor) and parameter.to_local().data_ptr() != local.data_ptr():
                raise StateError(
                    f"parameter {index} must stay in its memory: construct the optimizer after the model was moved, "
                    "cast and sharded"
                )

    def _check_full(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """State by parameter. Raises StateError, ShapeError for what does not fit."""
        given = self._read_full(state_dict)
        for index, parameter in enumerate(self._local_of):
            for name, value in given.get(index, {}).items():
                if name != "step" and value.shape != parameter.shape:
                    raise ShapeError(
                        f"{name} of parameter {index} must have the shape {tuple(parameter.shape)}, not "
                        f"{tuple(value.shape)}"
                    )
        return given


def _count_elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _defaults(kind: type[NearStorageOptimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a group before there is an optimizer of `kind`: those given, and its defaults."""
    settings = {*inspect.signature(StepSettings).parameters}
    known = {name: one for name, one in inspect.signature(kind).parameters.items() if name not in settings}
    given = {name: options.get(name, one.default) for name, one in known.items()}
    return {
        key: value for key, value in given.items() if type(value) is not bool and value is not inspect.Parameter.empty
    }


def own_paths(path: Any, rank: int) -> Any:
    """State file of a rank in each folder; what is no path stays, for the optimizer's own error."""
    if isinstance(path, str | Path):
        return Path(path) / f"rank{rank}.state"
    return [own_paths(one, rank) for one in path] if isinstance(path, list | tuple) else path


@torch.no_grad()
def _view_local(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, in the same memory. Raises FormatError for a placement without a part.

    CommandError for what accelerate has left in the parameter's place.
    """
    if "data_ptr" in vars(parameter):
        raise CommandError(f"parameter {name!r} must be a tensor, not what stands in for it until it is sharded: "
                           "prepare model and optimizer in one call of accelerator.prepare")  # fmt: skip
    if not isinstance(parameter, DTensor):
        return parameter
    if wrong := [place for place in parameter.placements if not (place.is_shard() or place.is_replicate())]:
        raise FormatError(f"parameter {name!r} must be placed as Shard or Replicate, not {wrong[0]}")
    return torch.nn.Parameter(parameter.to_local(), parameter.requires_grad)


def _name_shard(name: str, parameter: torch.Tensor) -> str:
    """Name of this rank's part in its state file, which says what it is of the whole."""
    if not isinstance(parameter, DTensor) or all(place.is_replicate() for place in parameter.placements):
        return name
    shape, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    first = first if 0 not in shape else (0,) * len(shape)
    stop = tuple(a + b for a, b in zip(first, shape, strict=True))
    return str(Shard(name, tuple(first), stop, tuple(parameter.shape)))


def _as_shard(name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A rank's part of the value `name` as a tensor that is sharded as the parameter."""
    if name == "step" or not isinstance(parameter, DTensor):
        return value
    local, mesh, shape = value.to(parameter.to_local().device), parameter.device_mesh, parameter.shape
    stride = parameter.stride()
    return DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _own_part(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """This rank's part of a whole value `name`, or of one that is sharded in any way."""
    if name == "step":
        return value
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    mesh, placements = parameter.device_mesh, parameter.placements
    if isinstance(value, DTensor):
        same = (value.device_mesh, value.placements) == (mesh, placements)
        return (value if same else value.redistribute(mesh, placements)).to_local()
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
