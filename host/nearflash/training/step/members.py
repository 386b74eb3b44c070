"""The tensors of parameter groups, by name and by torch's number."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nearflash.abi.errors import CommandError

__all__ = ["Member", "layout_of"]


def layout_of(groups: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[Any] | None]]:
    """The tensors of each group, each once, and their names: what numbers and names the state that they have."""
    names = [group.get("param_names") for group in groups]
    tensors = [list(map(id, dict.fromkeys(group.get("params", ())))) for group in groups]
    return [(ids, None if given is None else list(given)) for ids, given in zip(tensors, names, strict=True)]


@dataclass(frozen=True, eq=False)
class Member:
    """A tensor of the parameter groups."""

    name: str
    tensor: torch.Tensor
    group: int
    number: int
    """Its key in torch's state dicts."""

    @classmethod
    def of(cls, groups: Sequence[dict[str, Any]]) -> "list[Member]":
        """The tensors of all groups, in order, each once. Raises CommandError where not each of a group has a name.

        Names differ, as state is found by them: one that came before gets its count appended.
        """
        members: dict[int, Member] = {}
        number, taken = 0, set[str]()
        for group_index, group in enumerate(groups):
            given = group.get("param_names", [f"{group_index}.{i}" for i in range(len(group["params"]))])
            if len(given) != len(group["params"]):
                raise CommandError(
                    f"param_names of group {group_index} must name its {len(group['params'])} tensors, not "
                    f"{len(given)}: pass (name, tensor) pairs, as model.named_parameters() gives them"
                )
            for name, tensor in zip(given, group["params"], strict=True):
                # torch warns of a tensor that is twice in a group; here, too, it has one state.
                if id(tensor) not in members:
                    unique = next(n for n in _number(str(name)) if n not in taken)
                    taken.add(unique)
                    members[id(tensor)] = cls(unique, tensor, group_index, number)
                number += 1
        return list(members.values())

    @property
    def wants_state(self) -> bool:
        """Whether it is trained: frozen tensors have no state, and may be of any kind, until they get a gradient."""
        return self.tensor.requires_grad or self.tensor.grad is not None


def _number(name: str) -> Iterator[str]:
    yield name
    for count in itertools.count(2):
        yield f"{name} ({count})"
