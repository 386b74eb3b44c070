"""Which ranges of the flat vector one command can update: neighbours with the same scalars and the same copy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearflash.abi.commands import CopyFormat
from nearflash.abi.rules import AdamStep, Profile
from nearflash.training.parameters import FlatParameters

__all__ = ["Rule", "Run", "plan"]


@dataclass(frozen=True)
class Rule:
    """What is the same for all parameter groups: operation order, and AdamW (decoupled) or Adam with L2."""

    profile: Profile
    decoupled: bool

    def scalars(self, group: Mapping[str, Any], step: int) -> AdamStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        beta1, beta2 = group["betas"]
        return AdamStep(
            lr=float(group["lr"]),
            step=step,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self.decoupled,
            profile=self.profile,
        )


@dataclass(frozen=True)
class Run:
    """Parameters [start, stop) of the flat vector, multiples of 16, that one command can update."""

    start: int
    stop: int
    adam: AdamStep
    copy: CopyFormat


def plan(
    flat: FlatParameters, groups: Sequence[Mapping[str, Any]], active: Iterable[int], steps: Sequence[int], rule: Rule
) -> list[Run]:
    """Runs over the tensors `active` (ascending), each after `steps[tensor]` updates. Raises CommandError."""
    runs: list[Run] = []
    for tensor in active:
        entry = flat.entries[tensor]
        adam = rule.scalars(groups[flat.group_of[tensor]], steps[tensor] + 1)
        run = Run(entry.start, entry.stop, adam, flat.copy_format(tensor))
        if runs and (runs[-1].stop, runs[-1].adam, runs[-1].copy) == (run.start, run.adam, run.copy):
            runs[-1] = Run(runs[-1].start, run.stop, run.adam, run.copy)
        elif run.start < run.stop:
            runs.append(run)
    return runs
