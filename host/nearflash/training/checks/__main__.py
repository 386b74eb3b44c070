"""The table of nearflash's own optimizers, in Markdown, for docs/reference/conformance.md."""

import itertools
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import nearflash.training as ours
from nearflash.training.checks import BehaviourResult, conformance

__all__ = ["KINDS", "main", "table"]

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AdamW": ("NearStorageAdamW", "AdamW", {"lr": 0.01}),
    "Adam": ("NearStorageAdam", "Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": ("NearStorageSGD", "SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adagrad": ("NearStorageAdagrad", "Adagrad", {"lr": 0.01, "lr_decay": 0.01}),
}
"""Ours, torch's, and the settings of both. Lion is not in torch: its reference is `_Lion`."""


class _Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": decay, "maximize": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As torch's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                gradient = -p.grad if group["maximize"] else p.grad
                p.sub_(torch.sign(first * m + (1 - first) * gradient), alpha=group["lr"])
                m.mul_(second).add_(gradient, alpha=1 - second)
        return loss


def main() -> int:
    """Print the table of all optimizers, with both settings of `overlap`, in Markdown."""
    kinds = {name: (getattr(ours, mine), getattr(torch.optim, theirs), options, options)
             for name, (mine, theirs, options) in KINDS.items()}  # fmt: skip
    kinds["Lion"] = ours.NearStorageLion, _Lion, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01}
    tables: dict[str, list[BehaviourResult]] = {}
    with tempfile.TemporaryDirectory(prefix="nearflash-conformance-") as folder:
        numbers = itertools.count()
        for name, (mine, theirs, options, its) in kinds.items():
            for overlap in ("step", "backward"):
                common = {"extent_params": 1024, "overlap": overlap, **options}

                def make(params: Any, mine: Any = mine, common: Any = common) -> torch.optim.Optimizer:
                    return mine(params, path=Path(folder) / str(next(numbers)), **common)

                def reference(params: Any, theirs: Any = theirs, its: Any = its) -> torch.optim.Optimizer:
                    return theirs(params, **its)

                tables[f"{name}, {overlap}"] = conformance(make, reference)
    print(table(tables))
    return 0


def table(tables: Mapping[str, Sequence[BehaviourResult]]) -> str:
    """Rows of all optimizers side by side, in Markdown; then the messages of those that are not as torch."""
    first = next(iter(tables.values()))
    lines = ["| behaviour | outcome | message |", "|---|---|---|"]
    for index, row in enumerate(first):
        every = {name: rows[index] for name, rows in tables.items()}
        outcomes = {result.outcome for result in every.values()}
        if len(outcomes) == 1:
            outcome = row.outcome
        else:
            outcome = "; ".join(f"{name}: {result.outcome}" for name, result in every.items())
        details = sorted({re.sub(r"/\S*/[0-9]+", "FILE", result.detail) for result in every.values() if result.detail})
        lines.append(f"| {row.behaviour} | {outcome} | {details[0] if details else ''} |")
    return "\n".join([f"{', '.join(dict.fromkeys(name.partition(',')[0] for name in tables))}:", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
