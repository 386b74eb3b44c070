"""Which ranges of the flat vector one command can update: neighbours with the same scalars and the same copy."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import OptimizerStep
from nearflash.storage import Extent
from nearflash.training.step.parameters import FlatParameters

__all__ = ["ParameterRun", "StepPlan"]


@dataclass(frozen=True)
class ParameterRun:
    """Parameters [start, stop) of the flat vector, whole tensors with their padding or parts of them."""

    start: int
    stop: int
    rule: OptimizerStep
    copy: CopyFormat
    scalar: float
    """What their gradients are multiplied by, fp32."""

    def like(self, other: "ParameterRun") -> bool:
        """Whether one command could do both, were they neighbours."""
        return (self.rule, self.copy, self.scalar) == (other.rule, other.copy, other.scalar)


@dataclass(frozen=True)
class StepPlan:
    """The runs of one step, ascending and apart."""

    runs: tuple[ParameterRun, ...]

    @classmethod
    def of(
        cls,
        flat: FlatParameters,
        groups: Sequence[Mapping[str, Any]],
        active: Iterable[int],
        steps: Sequence[int],
        rule: Callable[[Mapping[str, Any], int], OptimizerStep],
        scalar: float,
    ) -> "StepPlan":
        """Over the tensors `active` (ascending), each after `steps[tensor]` updates; `rule(group, step)` is theirs.

        scalar: what gradients are multiplied by, and negated in groups with `maximize`. Raises CommandError.
        """
        runs: list[ParameterRun] = []
        rules: dict[tuple[int, int], OptimizerStep] = {}
        for tensor in active:
            entry, step = flat.entries[tensor], steps[tensor] + 1
            group = groups[flat.group_of[tensor]]
            key = (flat.group_of[tensor], step)
            if key not in rules:
                rules[key] = rule(group, step)
            factor = -scalar if group.get("maximize") else scalar
            run = ParameterRun(entry.start, entry.stop, rules[key], flat.copy_format(tensor), factor)
            if runs and runs[-1].stop == run.start and runs[-1].like(run):
                runs[-1] = replace(runs[-1], stop=run.stop)
            elif run.start < run.stop:
                runs.append(run)
        return cls(tuple(runs))

    @property
    def params(self) -> int:
        """Parameters of all runs, padding included."""
        return sum(run.stop - run.start for run in self.runs)

    def within(self, extent: Extent) -> Iterator[ParameterRun]:
        """The parts of runs that lie in an extent."""
        first = bisect_right(self.runs, extent.start, key=lambda run: run.stop)
        for run in self.runs[first:]:
            if run.start >= extent.stop:
                break
            yield replace(run, start=max(run.start, extent.start), stop=min(run.stop, extent.stop))
