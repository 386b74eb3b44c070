"""AdaGrad."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import AdagradStep, OptimizerStep
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.settings import Options

__all__ = ["NearStorageAdagrad"]


class NearStorageAdagrad(NearStorageOptimizer):
    """torch.optim.Adagrad with its state on flash; sums begin with zero."""

    _name = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if initial_accumulator_value:
            raise CommandError(
                f"initial_accumulator_value must be 0, not {initial_accumulator_value!r}: sums begin with zero"
            )
        scalars = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, scalars | {"maximize": maximize}, **options)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        return AdagradStep(lr_decay=float(group["lr_decay"]), eps=float(group["eps"]), **self._common(group, step))
