"""Predicted spans of a plan, beside those of a run: each part of prefill, and of every step of decode."""

import math
from collections.abc import Iterator

from nearflash.planning.plan_file import PlanFile
from nearflash.support.timeline import Predicted

__all__ = ["predict_spans"]

_WHOLE = "phases"


def predict_spans(plan: PlanFile, sequences: int) -> Iterator[Predicted]:
    """Spans of a run of so many prompts, block after block, each of the plan's own tokens.

    The parts of a phase begin together where the policy overlaps them, and follow one another where it does not; the
    steps of decode are taken as equal.
    """
    policy, prediction, new_tokens = plan.policy, plan.prediction, plan.workload.new_tokens
    steps, start = max(new_tokens - 1, 1), 0.0
    decode = {name: seconds / steps for name, seconds in prediction["decode_parts_seconds"].items()}
    for _ in range(math.ceil(sequences / policy.block_size)):
        phases = [("prefill", prediction["prefill_seconds"], prediction["prefill_parts_seconds"])]
        phases += [(f"step {step}", prediction["decode_seconds"] / steps, decode) for step in range(1, new_tokens)]
        for phase, seconds, parts in phases:
            yield Predicted(_WHOLE, phase, start, seconds)
            at = start
            for name, part in parts.items():
                if part > 0:
                    yield Predicted(name, phase, at, part)
                    at += 0.0 if policy.overlap else part
            start += seconds
