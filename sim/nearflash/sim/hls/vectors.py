"""Vectors for an optimizer: rules that take every branch, values at every edge and of all exponents."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, OptimizerStep, SgdStep

__all__ = ["EDGES", "edge_state", "rules"]

EDGES = np.array(
    [
        0x00000000,
        0x80000000,
        0x00000001,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x1E3CE508,
        0x33800000,
        0x3F7FFFFF,
        0x3F800000,
        0x3F800001,
        0xBF800000,
        0x5F000000,
        0xDF000000,
        0x7F7FFFFF,
    ],
    np.uint32,
)
"""Zeros of both signs, subnormals, the smallest normal, 1e-20, around one, 2^63, the largest."""  # fmt: skip


def rules() -> list[OptimizerStep]:
    """One rule for each shipped kernel, and for each of its branches."""
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    every_rule: list[OptimizerStep] = [LionStep(**options, step=3), LionStep(1e-3, 1)]
    for order in AdamStep.PROFILES:
        every_rule += [AdamStep(**options, step=step, decoupled=both, profile=order) for both in (True, False)
                  for step in (1, 1000)]  # fmt: skip
        every_rule += [AdamStep(1e-3, 7, profile=order)]
    for order in SgdStep.PROFILES:
        every_rule += [SgdStep(**options, step=1, profile=order), SgdStep(0.1, 5, profile=order)]
        every_rule += [SgdStep(**options, step=k, momentum=0.9, nesterov=True, profile=order) for k in (1, 2)]
        every_rule += [SgdStep(0.1, k, momentum=0.9, dampening=0.5, profile=order) for k in (1, 2)]
    for order in AdagradStep.PROFILES:
        every_rule += [AdagradStep(**options, step=3, lr_decay=0.01, profile=order), AdagradStep(0.1, 1, profile=order)]
    return every_rule


def edge_state(arrays: int, params: int, seed: int = 0) -> NDArray[np.float32]:
    """Gradients and `arrays` state arrays, fp32, (1 + arrays, params), in random order of parameters.

    Up to half are EDGES, in all combinations where they fit; the rest random over wide exponents, of which a third
    cancel (state near the gradient, of either sign) and one in 500 has a gradient that is not finite. From the third
    array on (squares, in the usual order) nine of ten are positive.
    """
    rng = np.random.default_rng(seed)
    rows = 1 + arrays
    state = rng.standard_normal((rows, params)) * 10.0 ** rng.uniform(-30, 12, (rows, params))
    near = rng.random(params) < 1 / 3
    state[1:, near] = state[0, near] * rng.choice([-1, 1, 0.125, -9.0], (arrays, int(near.sum())))
    positive = rng.random((rows, params)) < 0.9
    positive[:3] = False
    state = np.where(positive, np.abs(state), state).astype(np.float32)
    edges = _combinations(rng, rows, params // 2).view(np.float32)
    state[:, : edges.shape[1]] = edges
    state[0, rng.random(params) < 0.002] = rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32))
    return np.ascontiguousarray(state[:, rng.permutation(params)])


def _combinations(rng: np.random.Generator, rows: int, most: int) -> NDArray[np.uint32]:
    """Edges, (rows, n) with n <= most: all combinations, or random ones where there are too many."""
    if EDGES.size**rows <= most:
        return np.array(list(itertools.product(EDGES, repeat=rows)), np.uint32).T.copy()
    return rng.choice(EDGES, (rows, most))
