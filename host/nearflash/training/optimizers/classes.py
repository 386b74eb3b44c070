"""The near-storage optimizers.

They take torch's constructor arguments, and those of nearflash.training.optimizers.settings.Settings.

`foreach` and `fused` say how torch computes and mean nothing here; `capturable` and `differentiable` are refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, OptimizerStep, SgdStep
from nearflash.training.optimizers.base import NearStorageOptimizer

__all__ = ["NearStorageAdagrad", "NearStorageAdam", "NearStorageAdamW", "NearStorageLion", "NearStorageSGD"]


class NearStorageAdamW(NearStorageOptimizer):
    """torch.optim.AdamW; `decoupled=False` makes it Adam with L2."""

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
        **options: Any,
    ) -> None:
        if amsgrad:
            raise CommandError("amsgrad must be False, not True: no third moment is stored; leave it out")
        self._decoupled = decoupled
        scalars = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, scalars | {"maximize": maximize}, **options)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        beta1, beta2 = group["betas"]
        return AdamStep(
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            decoupled=self._decoupled,
            **self._common(group, step),
        )


class NearStorageAdam(NearStorageAdamW):
    """torch.optim.Adam: its weight decay is L2."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **({"decoupled": False} | options))


class NearStorageSGD(NearStorageOptimizer):
    """torch.optim.SGD; without momentum nothing is stored beside the parameters."""

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
        **options: Any,
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


class NearStorageAdagrad(NearStorageOptimizer):
    """torch.optim.Adagrad; sums begin with zero."""

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
        **options: Any,
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


class NearStorageLion(NearStorageOptimizer):
    """Lion (Chen et al. 2023), with the arguments of its authors' optimizer; torch has none."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        scalars = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, scalars | {"maximize": maximize}, **options)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        beta1, beta2 = group["betas"]
        return LionStep(beta1=float(beta1), beta2=float(beta2), **self._common(group, step))
