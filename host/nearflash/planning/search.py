"""The best policy for a machine: blocks are enumerated, shares are a linear program, and both are rounded to fit.

For each batch size and number of batches, a linear program (scipy's HiGHS) finds the shares of weights, cache and
activations on each tier that minimise time a sequence, within the memory of each tier and a bound on the block's time.
The best are rounded to what a runtime places (layers of weights, a layer's cache of one batch, batches of
activations), then predicted and checked again: a policy that does not fit is never returned.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from nearflash.abi.errors import PlanError
from nearflash.planning.cost import Prediction, chains, predict
from nearflash.planning.memory import TIERS, Peak, bounds, peak_vectors, peaks
from nearflash.planning.policy import OffloadPolicy, Shares, attends_on_host
from nearflash.planning.profile import Machine
from nearflash.planning.shapes import ModelShape
from nearflash.planning.terms import VARIABLES, PolicyOptions, Vector, Workload, terms

__all__ = ["Plan", "Space", "Workload", "plan_for", "search", "tokens_per_second_at_best"]

_ROUNDED = 12
"""The best programs that are rounded before the best plan is returned."""
_NEARER = {"host": 1e-5, "device": 2e-5, "disk": 1e-4}
"""What a share costs by tier beside its time, as a fraction of it: decides between plans that are equal."""
_REFINED = 2
"""The best programs of powers of two whose neighbours are tried."""


@dataclass(frozen=True)
class Space:
    """Choices that may be tried.

    batch_sizes, batch_counts: None for powers of two, as far as any fits, then what lies between those and the best.
    cpu_attention, weight_bits, cache_bits: each value is tried. stored_fraction: of weights that are compressed
    already; crossing_fraction: of what crosses the link to a GPU. read_fraction: of K and V, by attention. max_seconds:
    longest time of a block. max_sequences: prompts that there are; blocks that divide them evenly are tried too.
    groups: of batches that ranks compute in turn; predicted times are those of one group.
    Raises PlanError for 4 bits of weights that are compressed already.
    """

    batch_sizes: Sequence[int] | None = None
    batch_counts: Sequence[int] | None = None
    cpu_attention: Sequence[bool] = (False, True)
    weight_bits: Sequence[int] = (16,)
    cache_bits: Sequence[int] = (16,)
    stored_fraction: float = 1.0
    crossing_fraction: float = 0.0
    read_fraction: float = 1.0
    max_seconds: float | None = None
    max_sequences: int | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        if self.stored_fraction < 1 and 4 in self.weight_bits:
            raise PlanError(
                f"bits must be 16 for weights that are compressed already, in {self.stored_fraction:.2f} of their "
                "bytes, as they stay: leave out 4, or plan the checkpoint that is not compressed"
            )

    def share_filled(self, block_size: int) -> float:
        """Share of its blocks' places that the list of prompts fills."""
        number = self.max_sequences or block_size
        return number / (-(-number // block_size) * block_size)


@dataclass(frozen=True)
class Plan:
    """A policy that fits, for a shape, machine and workload, and what to expect of it; of several ranks, `stages` are
    the plans of each.
    """

    shape: ModelShape
    machine: Machine
    workload: Workload
    policy: OffloadPolicy
    prediction: Prediction
    peaks: dict[str, Peak]
    stages: tuple["Plan", ...] = ()

    @property
    def ranks(self) -> int:
        """Processes that run it."""
        return max(1, len(self.stages))


def plan_for(shape: ModelShape, machine: Machine, workload: Workload, policy: OffloadPolicy) -> Plan:
    """A plan of a given policy. Raises PlanError, naming the tier, where it does not fit."""
    by_tier = peaks(shape, machine, workload, policy)
    for peak in by_tier.values():
        if not peak.fits:
            raise PlanError(
                f"a plan must fit {peak.tier} memory: it needs {peak.peak_bytes / 1e9:.2f} GB of the "
                f"{peak.limit_bytes / 1e9:.2f} GB that {machine.name} has there"
            )
    return Plan(shape, machine, workload, policy, predict(shape, machine, workload, policy), by_tier)


def search(shape: ModelShape, machine: Machine, workload: Workload, space: Space | None = None) -> Plan:
    """The plan of most tokens a second. Raises PlanError where none fits, and for prompts longer than the model's."""
    space = space or Space()
    longest = workload.prompt_tokens + workload.new_tokens
    if longest > shape.max_tokens:
        raise PlanError(f"prompt and new tokens must be {shape.max_tokens} at most for this model, not {longest}")
    programs = sorted(_programs(shape, machine, workload, space), key=lambda program: program[0])
    programs += _between(shape, machine, workload, space, [options for _, options, _ in programs[:_REFINED]])
    programs.sort(key=lambda program: program[0])
    best: Plan | None = None

    def speed(plan: Plan) -> float:
        return plan.prediction.tokens_per_second * space.share_filled(plan.policy.block_size)

    for at, (_, options, shares) in enumerate(programs):
        if best is not None and at >= _ROUNDED:
            break
        plan = _round(shape, machine, workload, options, shares)
        if plan is not None and _within(plan, space) and (best is None or speed(plan) > speed(best)):
            best = plan
    if best is None:
        raise PlanError(_why_not(shape, machine, workload, space))
    return best


def tokens_per_second_at_best(shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions) -> float:
    """The most that shares can give a block, before they are rounded; 0 where it does not fit, or no solver tells."""
    solved = _solve(shape, machine, workload, options, None)
    return workload.new_tokens / solved[0] if solved and solved[0] > 0 else 0.0


def _within(plan: Plan, space: Space) -> bool:
    return space.max_seconds is None or plan.prediction.seconds <= space.max_seconds * (1 + 1e-6)


def _programs(
    shape: ModelShape, machine: Machine, workload: Workload, space: Space
) -> Iterator[tuple[float, PolicyOptions, Vector]]:
    """Seconds a sequence, options and shares of every linear program that has a solution."""
    every = itertools.product(space.cpu_attention, space.weight_bits, space.cache_bits)
    one_memory = machine.links.one_memory
    kinds = dict.fromkeys(
        (there and attends_on_host(one_memory, bits), weights, bits) for there, weights, bits in every
    )
    for cpu_attention, weight_bits, cache_bits in kinds:
        for size in _sizes(space.batch_sizes, space.max_sequences, space.groups):
            any_fits = False
            for count in _sizes(space.batch_counts, space.max_sequences, size * space.groups):
                fractions = space.stored_fraction, space.read_fraction, space.crossing_fraction
                bits = weight_bits, cache_bits
                options = PolicyOptions(size, count, cpu_attention, *bits, *fractions, groups=space.groups)
                solved = _solve(shape, machine, workload, options, space.max_seconds)
                if solved is None:
                    break  # more batches need more of everything
                any_fits = True
                yield solved[0] / space.share_filled(options.held_size), options, solved[1]
            if not any_fits:
                break  # and so do larger ones


def _between(
    shape: ModelShape, machine: Machine, workload: Workload, space: Space, best: Sequence[PolicyOptions]
) -> Iterator[tuple[float, PolicyOptions, Vector]]:
    """Programs of blocks between the best ones and their neighbours, where sizes were not given."""
    tried = set(best)
    for options in best:
        sizes = [options.batch_size] if space.batch_sizes else _near(options.batch_size)
        if space.max_sequences is not None and not space.batch_sizes:
            batches = options.num_batches * options.groups
            sizes += [_even(space.max_sequences, size * batches, batches) for size in sizes]
        counts = [options.num_batches] if space.batch_counts else _near(options.num_batches)
        for size, count in itertools.product(sizes, counts):
            near = replace(options, batch_size=size, num_batches=count)
            if near in tried or (space.max_sequences is not None and near.held_size > space.max_sequences):
                continue
            tried.add(near)
            if solved := _solve(shape, machine, workload, near, space.max_seconds):
                yield solved[0] / space.share_filled(near.held_size), near, solved[1]


def _near(number: int) -> list[int]:
    return sorted({max(1, number * 3 // 4), number, max(1, number * 5 // 4), number * 3 // 2})


def _even(sequences: int, block_size: int, count: int) -> int:
    """The batch size with which as many blocks hold all sequences evenly."""
    blocks = -(-sequences // block_size)
    return -(-sequences // (blocks * count))


def _sizes(given: Sequence[int] | None, most: int | None, size: int = 1) -> Iterable[int]:
    every = given or _doubling()
    return itertools.takewhile(lambda number: most is None or number * size <= max(most, size), every)


def _doubling() -> Iterator[int]:
    """1, 2, 4, … to 4,096."""
    return (1 << power for power in range(13))


def _solve(
    shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions, max_seconds: float | None
) -> tuple[float, Vector] | None:
    """Least seconds a sequence and the shares that give them, or None where nothing fits."""
    number, steps = len(VARIABLES), workload.new_tokens - 1
    prefill, decode = chains(terms(shape, machine, workload, options), machine, options)
    rows: list[Vector] = []
    bounds_above: list[float] = []
    for room, vectors in bounds(machine, peak_vectors(shape, machine, workload, options)):
        for vector in vectors:
            scale = max(room, 1.0)
            rows.append(np.append(vector[:-1], (0.0, 0.0)) / scale)
            bounds_above.append((room - vector[-1]) / scale)
    if min(bounds_above) < 0:
        return None
    slowest = max(float(np.max(vector)) for vector in (*prefill.values(), *decode.values()))
    scale = slowest or 1.0
    for at, part in enumerate((prefill, decode)):
        for vector in part.values():
            row = np.append(vector[:-1] / scale, (0.0, 0.0))
            row[number + at] = -1.0
            rows.append(row)
            bounds_above.append(-vector[-1] / scale)
    objective = np.zeros(number + 2)
    objective[number:] = (1.0, steps)
    if max_seconds is not None:
        rows.append(objective.copy())
        bounds_above.append(max_seconds / scale)
    # Of two equal plans, the one that moves less and writes nothing.
    for at, name in enumerate(VARIABLES):
        objective[at] = _NEARER.get(name.rpartition(".")[2], 0.0) * (1 + steps)
    sums = np.zeros((3, number + 2))
    for at, what in enumerate(("weights.", "cache.", "activations.")):
        sums[at, [column for column, name in enumerate(VARIABLES) if name.startswith(what)]] = 1
    ranges = [(0.0, 1.0 if _exists(name, machine) else 0.0) for name in VARIABLES] + [(0.0, None)] * 2
    solved = linprog(objective, A_ub=np.array(rows), b_ub=bounds_above, A_eq=sums, b_eq=np.ones(3), bounds=ranges,
                     method="highs")  # fmt: skip
    if solved.status != 0:
        return None
    return float(solved.fun) * scale / options.block_size, np.asarray(solved.x[:number], float)


def _exists(name: str, machine: Machine) -> bool:
    tier = name.rpartition(".")[2]
    return tier in ("gpu", "host") or (machine.disk if tier == "disk" else machine.device) is not None


def _round(
    shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions, shares: Vector
) -> Plan | None:
    """The plan with shares rounded to what a runtime places, moved away from tiers that overflow; None if none fits."""
    layers, batches = len(shape.layers), options.num_batches * options.groups
    grains = {"weights": layers, "cache": layers * batches, "activations": batches}
    counts = {what: _grains(what, shares, grain) for what, grain in grains.items()}
    tiers = [tier for tier in TIERS if tier in ("gpu", "host") or _exists(f"cache.{tier}", machine)]
    for _ in range(4 * layers + 8):
        by_tier = peaks(shape, machine, workload, _policy(options, counts, grains))
        over = next((peak for peak in by_tier.values() if not peak.fits), None)
        if over is None:
            best = _plan(shape, machine, workload, options, _policy(options, counts, grains), by_tier)
            return _fill(
                best, counts, lambda tried: _plan(shape, machine, workload, options, _policy(options, tried, grains))
            )
        if not _move(counts, over, by_tier, tiers, grains):
            return None
    return None


def _plan(
    shape: ModelShape, machine: Machine, workload: Workload, options: PolicyOptions, policy: OffloadPolicy,
    by_tier: dict[str, Peak] | None = None,
) -> Plan:  # fmt: skip
    """A policy's plan, whose times are those of one group of batches. by_tier: its peaks, where they are known."""
    prediction = predict(shape, machine, workload, replace(policy, num_batches=options.num_batches))
    found = peaks(shape, machine, workload, policy) if by_tier is None else by_tier
    return Plan(shape, machine, workload, policy, prediction, found)


def _fill(
    best: Plan, counts: dict[str, dict[str, int]], plan_of: Callable[[dict[str, dict[str, int]]], Plan]
) -> Plan:  # fmt: skip
    """The plan of counts that fit, with KV or hidden states taken from the disk into what rounding left free, where
    that is faster: what whole layers leave of memory may hold all of them.
    """
    for what, tier in itertools.product(("cache", "activations"), ("gpu", "host")):
        on_disk = counts[what].get("disk", 0)
        tried = counts | {what: counts[what] | {"disk": 0, tier: counts[what].get(tier, 0) + on_disk}}
        plan = plan_of(tried) if on_disk else best
        if plan.prediction.seconds < best.prediction.seconds and all(peak.fits for peak in plan.peaks.values()):
            best, counts = plan, tried
    return best


def _grains(what: str, shares: Vector, grain: int) -> dict[str, int]:
    """Whole parts by tier, the remainder where most of a part was left."""
    exact = {name.partition(".")[2]: share * grain for name, share in zip(VARIABLES, shares, strict=True)
             if name.startswith(f"{what}.")}  # fmt: skip
    counts = {tier: math.floor(amount + 1e-6) for tier, amount in exact.items()}
    for tier in sorted(exact, key=lambda tier: counts[tier] - exact[tier])[: grain - sum(counts.values())]:
        counts[tier] += 1
    return counts


def _move(
    counts: dict[str, dict[str, int]],
    over: Peak,
    by_tier: dict[str, Peak],
    tiers: Sequence[str],
    grains: dict[str, int],
) -> bool:
    """Move a part away from the tier that overflows, to the next one that has room; False where there is none."""
    excess = (over.peak_bytes - over.limit_bytes) / max(over.peak_bytes, 1.0)
    # From a device back to the host's tiers, else downwards.
    lower = [tier for tier in tiers if tier != "device" and tier != over.tier and by_tier[tier].fits]
    lower = [tier for tier in lower if over.tier == "device" or tiers.index(tier) > tiers.index(over.tier)]
    for what, target in itertools.product(("cache", "weights", "activations"), lower):
        if counts[what].get(over.tier, 0):
            number = max(1, min(counts[what][over.tier], math.floor(excess * grains[what] / 2)))
            counts[what][over.tier] -= number
            counts[what][target] += number
            return True
    return False


def _policy(options: PolicyOptions, counts: dict[str, dict[str, int]], grains: dict[str, int]) -> OffloadPolicy:
    shares = {what: Shares(**{tier: count / grains[what] for tier, count in tiers.items()})
              for what, tiers in counts.items()}  # fmt: skip
    return OffloadPolicy(
        options.batch_size,
        options.num_batches * options.groups,
        shares["weights"],
        shares["cache"],
        shares["activations"],
        cpu_attention=options.cpu_attention,
        weight_bits=options.weight_bits,
        cache_bits=options.cache_bits,
        stored_fraction=options.stored_fraction,
        crossing_fraction=options.crossing_fraction,
        read_fraction=options.read_fraction,
    )


def _why_not(shape: ModelShape, machine: Machine, workload: Workload, space: Space) -> str:
    """State what a plan for one sequence at a time lacks."""
    if space.max_seconds is not None:
        try:
            plan = search(shape, machine, workload, replace(space, max_seconds=None, batch_sizes=(1,),
                                                            batch_counts=(1,)))  # fmt: skip
        except PlanError:
            pass
        else:
            least = f"{plan.prediction.seconds:.3g}"
            return f"max_seconds must be {least} or more for one sequence on {machine.name}, not {space.max_seconds}"
    last = "disk" if machine.disk else "host"
    shares = Shares(**{last: 1})
    policy = OffloadPolicy(
        1, 1, shares, shares, Shares(host=1), weight_bits=min(space.weight_bits), cache_bits=min(space.cache_bits),
        stored_fraction=space.stored_fraction, crossing_fraction=space.crossing_fraction,
    )  # fmt: skip
    by_tier = peaks(shape, machine, workload, policy)
    needs = ", ".join(f"{peak.peak_bytes / 1e9:.2f} GB on {peak.tier} (of {peak.limit_bytes / 1e9:.2f} GB)"
                      for peak in by_tier.values() if not peak.fits)  # fmt: skip
    return (f"a model must fit {machine.name}: one sequence of it with everything on {last} needs "
            f"{needs or 'more than its tiers have together'}; make prompts shorter, or quantise")  # fmt: skip
