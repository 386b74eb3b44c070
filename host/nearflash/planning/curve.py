"""Latency against throughput: the best plan for 1, 2, 4, … prompts at once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nearflash.abi.errors import PlanError
from nearflash.planning.pipeline import search_pipeline
from nearflash.planning.policy import OffloadPolicy
from nearflash.planning.profile import Machine
from nearflash.planning.search import Plan, Space
from nearflash.planning.shapes import ModelShape
from nearflash.planning.terms import Workload

__all__ = ["curve_points", "plan_curve"]


def plan_curve(shape: ModelShape, machine: Machine, workload: Workload, space: Space, ranks: int = 1) -> Iterator[Plan]:
    """The plans for so many ranks, the smallest block first; numbers of prompts planned as fewer are left out.

    As far as space.max_sequences, 4,096 without one. Raises PlanError where not even one sequence fits.
    """
    most, number, before = space.max_sequences or 4096, 1, list[OffloadPolicy]()
    while number < 2 * most:
        try:
            plan = search_pipeline(shape, machine, workload, replace(space, max_sequences=min(number, most)), ranks)
        except PlanError:
            if not before:
                raise
            return
        if plan.policy not in before:
            before.append(plan.policy)
            yield plan
        number *= 2


def curve_points(plans: list[Plan]) -> list[dict[str, Any]]:
    """A point a plan: sequences at once, seconds until all their tokens are there and of a step, tokens a second."""
    return [
        {
            "sequences": plan.policy.block_size,
            "batch_size": plan.policy.batch_size,
            "num_batches": plan.policy.num_batches,
            "seconds": plan.prediction.seconds,
            "seconds_to_first_token": plan.prediction.prefill_s,
            "seconds_a_step": plan.prediction.decode_s / max(plan.workload.new_tokens - 1, 1),
            "tokens_per_second": plan.prediction.tokens_per_second,
            "bottleneck": plan.prediction.bottleneck,
        }
        for plan in plans
    ]
