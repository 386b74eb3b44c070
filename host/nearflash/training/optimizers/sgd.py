"""SGD with momentum."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from nearflash.abi.optimizers import OptimizerStep, SgdStep
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.settings import Options

__all__ = ["NearStorageSGD"]


class NearStorageSGD(NearStorageOptimizer):
    """torch.optim.SGD with its state on flash; without momentum nothing is stored beside the parameters."""

    _name = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        scalars = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, scalars | {"nesterov": nesterov, "maximize": maximize}, **options)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        return SgdStep(
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            **self._common(group, step),
        )
