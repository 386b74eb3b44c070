"""Which arrays a state stores."""

from collections.abc import Iterable, Sequence

from nearflash.abi.optimizers import BLOCK_PARAMS, OptimizerStep, StateFormat
from nearflash.storage import StateArray
from nearflash.training.gradients.compression import TopK
from nearflash.training.step.transfer import HOST_ARRAYS

__all__ = ["arrays_of", "join_arrays"]


def arrays_of(rules: Sequence[OptimizerStep], compression: TopK | None) -> tuple[StateArray, ...]:
    """The arrays that must be stored so that every one of the rules finds its own: p first, the residual last."""
    arrays = {"p": StateArray("p")}
    for rule in rules:
        for role, torch_name in rule.torch_names.items():
            arrays[role] = StateArray(role, rule.state_format.element_bytes, 1, torch_name)
            if rule.state_format is StateFormat.MX8:
                arrays[f"{role}_scale"] = StateArray(f"{role}_scale", 1, BLOCK_PARAMS)
    if compression is not None and compression.feedback and compression.saved:
        arrays |= _RESIDUALS[compression.residual]
    return tuple(arrays.values())


def join_arrays(stored: Iterable[StateArray], wanted: Iterable[StateArray]) -> tuple[StateArray, ...]:
    """The stored arrays, and those that are wanted beside them: what stays in host memory last."""
    every = dict.fromkeys((*stored, *wanted))
    return tuple(sorted(every, key=lambda array: array.name in HOST_ARRAYS))


_RESIDUALS = {
    "fp32": {"residual": StateArray("residual")},
    "int4": {"residual": StateArray("residual", 1, 2), "residual_scale": StateArray("residual_scale", 2, 16)},
}
