"""Lion. Source: Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS'23)."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from nearflash.abi.optimizers import LionStep, OptimizerStep
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.settings import Options

__all__ = ["NearStorageLion"]


class NearStorageLion(NearStorageOptimizer):
    """Lion with its state on flash, with the arguments of its authors' optimizer; torch has none."""

    _name = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        scalars = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, scalars | {"maximize": maximize}, **options)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        beta1, beta2 = group["betas"]
        return LionStep(beta1=float(beta1), beta2=float(beta2), **self._common(group, step))
