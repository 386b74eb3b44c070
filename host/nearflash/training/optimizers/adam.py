"""Adam: AdamW with decoupled weight decay, and Adam with L2."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import AdamStep, OptimizerStep
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.settings import Options

__all__ = ["NearStorageAdam", "NearStorageAdamW"]

_NO_AMSGRAD = "amsgrad must be False, not True: no third moment is stored; leave it out"


class NearStorageAdamW(NearStorageOptimizer):
    """torch.optim.AdamW with its state on flash; `decoupled=False` makes it Adam with L2."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled: bool = True,
        **options: Unpack[Options],
    ) -> None:
        if amsgrad:
            raise CommandError(_NO_AMSGRAD)
        self._decoupled, self._name = decoupled, "adamw" if decoupled else "adam"
        scalars = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, scalars | {"maximize": maximize}, **options)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        if group.get("amsgrad"):
            raise CommandError(_NO_AMSGRAD)
        decoupled = group.get("decoupled_weight_decay", self._decoupled)  # torch's name, in its param_groups
        if decoupled != self._decoupled:
            raise CommandError(
                f"decoupled_weight_decay must be {self._decoupled} in every group, as of {type(self).__name__}, not "
                f"{decoupled!r}: take NearStorageAdamW for decoupled decay, NearStorageAdam for L2"
            )
        beta1, beta2 = group["betas"]
        return AdamStep(
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            decoupled=self._decoupled,
            **self._common(group, step),
        )


class NearStorageAdam(NearStorageAdamW):
    """torch.optim.Adam with its state on flash: its weight decay is L2."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled=False, **options)
