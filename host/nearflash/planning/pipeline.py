"""Plans for the ranks of a pipeline: each has some of the layers, and the memory, links and drives of one machine.

Batches are in as many groups as there are ranks, and one rank computes a group while the next one computes another. A
rank loads a layer's weights once for each group. A group's next token waits for its pass through all ranks: a step
takes as long as the busiest rank's work for all groups, or one group's pass, whichever is longer. Engines, which
attend on near-storage drives, serve one rank alone, so that plans for several leave these out. Bytes between ranks are
planned, the time of sending them is not.

Source: FlexGen (arXiv 2303.06865), section 4.4.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nearflash.abi.errors import PlanError
from nearflash.planning.cost import Prediction, predict
from nearflash.planning.policy import OffloadPolicy
from nearflash.planning.profile import Machine
from nearflash.planning.search import Plan, Space, plan_for, search
from nearflash.planning.shapes import ModelShape
from nearflash.planning.stages import (
    STATES_SENT,
    TOKENS_SENT,
    StageShape,
    group_sizes,
    place_on_stage,
    stage_shapes,
)
from nearflash.planning.terms import Workload

__all__ = ["plan_pipeline", "search_pipeline"]

_TOKEN_BYTES = 8
_TRIES = 4
"""Searches for a block that ends in time."""


def search_pipeline(shape: ModelShape, machine: Machine, workload: Workload, space: Space, ranks: int) -> Plan:
    """The plan of most tokens a second for so many ranks, each of which is `machine`; `search` for one.

    Raises CommandError for more ranks than layers, PlanError, naming the rank, where nothing fits.
    """
    if ranks == 1:
        return search(shape, machine, workload, space)
    machine = replace(machine, device=None)
    if space.max_seconds is None:
        return _best(shape, machine, workload, ranks, space)
    least = _best(shape, machine, workload, ranks, replace(space, max_seconds=None, max_sequences=1)).prediction.seconds
    bound = space.max_seconds / ranks  # of the work of one rank for one group
    for _ in range(_TRIES):
        if bound * ranks < least:
            break
        plan = _best(shape, machine, workload, ranks, replace(space, max_seconds=bound))
        if plan.prediction.seconds <= space.max_seconds:
            return plan
        bound *= 0.95 * space.max_seconds / plan.prediction.seconds
    raise PlanError(f"max_seconds must be {least:.3g} or more for one sequence on {ranks} ranks of {machine.name}, not "
                    f"{space.max_seconds}")  # fmt: skip


def plan_pipeline(shape: ModelShape, machine: Machine, workload: Workload, policy: OffloadPolicy, ranks: int) -> Plan:
    """A plan of a given policy; its peaks are those of the rank that needs most, its bytes those of all ranks.

    Raises CommandError for more ranks than layers, PlanError, naming the rank and the tier, where it does not fit.
    """
    plans, passes = [], []
    for stage in stage_shapes(shape, ranks):
        placed = place_on_stage(shape, policy, stage)
        counts = group_sizes(policy.num_batches, ranks)
        passes.append([predict(stage, machine, workload, replace(placed, num_batches=count)) for count in counts])
        plans.append(_plan_stage(machine, workload, placed, stage, passes[-1]))
    fullest = {tier: max((plan.peaks[tier] for plan in plans), key=lambda peak: peak.peak_bytes)
               for tier in plans[0].peaks}  # fmt: skip
    prediction = _join([plan.prediction for plan in plans], passes)
    return Plan(shape, machine, workload, policy, prediction, fullest, tuple(plans))


def _best(shape: ModelShape, machine: Machine, workload: Workload, ranks: int, space: Space) -> Plan:
    """The best of as many groups as ranks, and of one batch, for which layers are loaded once."""
    widest = max(stage_shapes(shape, ranks), key=lambda stage: (sum(stage.layer_bytes()), stage.rank))
    plans, errors = list[Plan](), list[PlanError]()
    for groups in sorted({1, min(ranks, space.max_sequences or ranks)}):
        counts = (1,) if groups < ranks else space.batch_counts
        try:
            found = search(widest, machine, workload, replace(space, groups=groups, batch_counts=counts))
            plans.append(plan_pipeline(shape, machine, workload, found.policy, ranks))
        except PlanError as error:
            errors.append(PlanError(f"{widest.name}: {error}"))
    if not plans:
        raise errors[0]
    return max(plans, key=lambda plan: plan.prediction.tokens_per_second * space.share_filled(plan.policy.block_size))


def _plan_stage(
    machine: Machine, workload: Workload, placed: OffloadPolicy, stage: StageShape, passes: Sequence[Prediction]
) -> Plan:
    """One rank's plan: its layers, and all groups that pass them."""
    try:
        plan = plan_for(stage, machine, workload, placed)
    except PlanError as error:
        raise PlanError(f"{stage.name}: {error}") from error
    tokens = placed.block_size * workload.new_tokens
    moved = _sum_bytes(passes)
    if stage.sends:
        states = stage.element_bytes * stage.hidden * placed.block_size
        moved[STATES_SENT] = states * (workload.prompt_tokens + workload.new_tokens - 1)
    elif stage.ranks > 1:
        moved[TOKENS_SENT] = float(_TOKEN_BYTES * tokens * (stage.ranks - 1))
    busy = Prediction(
        sum(part.prefill_s for part in passes), sum(part.decode_s for part in passes), tokens,
        placed.block_size * (workload.new_tokens - 1), _add(part.prefill for part in passes),
        _add(part.decode for part in passes), {link: size / tokens for link, size in moved.items()},
        passes[0].bottleneck,
    )  # fmt: skip
    return replace(plan, prediction=busy)


def _sum_bytes(passes: Sequence[Prediction]) -> dict[str, float]:
    """Bytes of all groups by link."""
    return _add({link: size * part.generated_tokens for link, size in part.bytes_per_token.items()} for part in passes)


def _join(busy: Sequence[Prediction], passes: Sequence[Sequence[Prediction]]) -> Prediction:
    """The block of all ranks. passes: of each rank, of each group."""
    prefill_s = _pass_ranks([[part.prefill_s for part in groups] for groups in passes])
    decode_s = max(each.decode_s for each in busy)
    for group in zip(*passes, strict=True):
        decode_s = max(decode_s, sum(part.decode_s for part in group))
    slowest = max(busy, key=lambda each: each.seconds)
    return replace(
        slowest, prefill_s=prefill_s, decode_s=decode_s,
        bytes_per_token=_add(each.bytes_per_token for each in busy),
    )  # fmt: skip


def _pass_ranks(seconds: Sequence[Sequence[float]]) -> float:
    """When the last rank is done with the last group: a rank begins a group when the one before has done it, and when
    it has done the group before itself. seconds: of each rank, of each group.
    """
    done = [0.0] * len(seconds[0])
    for rank in seconds:
        free = 0.0
        for group, spent in enumerate(rank):
            free = done[group] = max(free, done[group]) + spent
    return done[-1]


def _add(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
