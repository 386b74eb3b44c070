"""Muon for hidden matrices and AdamW for all else, in one optimizer and one store."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

import torch

from nearflash.abi.errors import CommandError, ShapeError
from nearflash.abi.optimizers import AdamStep, OptimizerStep
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.muon import COEFFICIENTS, MuonStep
from nearflash.training.step.settings import Options

__all__ = ["NearStorageMuon"]

_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
"""torch.optim.AdamW's, for groups with use_muon=False."""


class NearStorageMuon(NearStorageOptimizer):
    """torch.optim.Muon with its state on flash, and torch.optim.AdamW in groups with `use_muon=False`.

    Groups of Muon hold matrices. `betas` are AdamW's. What a group of AdamW does not have of `lr`, `eps` and
    `weight_decay` are AdamW's defaults.
    """

    _elementwise: ClassVar[bool] = False
    _name = "muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        if options.get("compression") is not None:
            raise CommandError("compression must be None for Muon: the orthogonalisation needs all of a gradient")
        scalars = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        newton = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, scalars | newton | {"use_muon": True, "betas": _ADAMW["betas"]}, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time. Raises what construction raises, ShapeError for a tensor that is no matrix."""
        given = param_group["params"]
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        if not isinstance(given, set):  # which torch rejects: it has no order
            param_group["params"] = tensors
        if not param_group.get("use_muon", self.defaults["use_muon"]):
            for name, value in _ADAMW.items():
                param_group.setdefault(name, value)
        else:
            for index, item in enumerate(tensors):
                name, tensor = item if isinstance(item, tuple) else (str(index), item)
                if isinstance(tensor, torch.Tensor) and tensor.ndim != 2:
                    raise ShapeError(
                        f"parameter {name!r} of a group must be a matrix for Muon, not of shape {tuple(tensor.shape)}: "
                        "put it into a group with use_muon=False, which AdamW updates"
                    )
        super().add_param_group(param_group)

    def rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Scalars of a group's tensors at their step (from 1). Raises CommandError for values out of range."""
        if not group.get("use_muon", True):
            beta1, beta2 = group["betas"]
            return AdamStep(
                beta1=float(beta1), beta2=float(beta2), eps=float(group["eps"]), **self._common(group, step)
            )
        a, b, c = group["ns_coefficients"]
        return MuonStep(
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            coefficients=(float(a), float(b), float(c)),
            eps=float(group["eps"]),
            ns_steps=int(group["ns_steps"]),
            adjust_lr_fn=group["adjust_lr_fn"],
            **self._common(group, step),
        )

    # torch.optim.Muon's names

    def full_state_dict(self) -> dict[str, Any]:
        """As the base class; matrices have torch.optim.Muon's `momentum_buffer`, and no other moment."""
        full = super().full_state_dict()
        for number in _numbers_of_muon(full, self.param_groups):
            if (state := full["state"].get(number)) is not None:
                state.pop("exp_avg_sq", None)
                if "exp_avg" in state:
                    state["momentum_buffer"] = state.pop("exp_avg")
        return full

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class, with the names of `full_state_dict`, or of torch's two optimizers."""
        state = state_dict.get("state")
        if isinstance(state, Mapping):
            renamed = dict(state)
            for number in _numbers_of_muon(state_dict, self.param_groups):
                held = renamed.get(number)
                if isinstance(held, Mapping) and "momentum_buffer" in held:
                    others = {name: value for name, value in held.items() if name != "momentum_buffer"}
                    renamed[number] = {"step": torch.tensor(1.0), "exp_avg": held["momentum_buffer"], **others}
            state_dict = state_dict | {"state": renamed}
        super().load_full_state_dict(state_dict)


def _numbers_of_muon(state_dict: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Keys of the tensors of Muon's groups in a state dict."""
    theirs = state_dict.get("param_groups") or []
    pairs = zip(groups, theirs, strict=False)  # a number of groups that differs is an error of the base class
    return [number for mine, other in pairs if mine.get("use_muon", True) for number in other.get("params", ())]
