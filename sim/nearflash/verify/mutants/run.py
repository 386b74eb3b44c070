"""Runs the vectors of each unit on each of its mutants, and looks at the survivors."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.errors import ConfigError
from nearflash.sim.stalls import SimulationTimeout, StallPattern, UnexpectedItems
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.mutants.equivalence import is_equivalent
from nearflash.verify.mutants.mutants import MUTANT, make_mutants
from nearflash.verify.mutants.target import Target, Vectors

__all__ = ["run", "run_target"]


def run(
    targets: Mapping[str, Target], *, mutants: int | None = None, seed: int = 0, survivors: bool = False
) -> Iterator[dict[str, Any]]:
    """One row a unit: bench, unit, mutants, killed, equivalent, kill_fraction (of those not equivalent).

    targets: by the unit's name; mutants: how many instead of the target's number; survivors: list their commands.

    Raises ConfigError where the original itself differs from the model.
    """
    for name, target in targets.items():
        row, left = run_target(name, target, mutants or target.mutants, seed)
        yield row | ({"survivors": left} if survivors else {})


def run_target(name: str, target: Target, count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The row of one unit, and Yosys' commands of the mutants that live and are not proven equivalent."""
    rng, library = np.random.default_rng(seed), f"mutation_{name.replace('.', '_')}"
    with tempfile.TemporaryDirectory() as folder:
        made = make_mutants(target.component(), count, seed, Path(folder), part=target.part)
        unit = StreamUnit(made.design, library) if target.stalls else BurstUnit(made.design, library)
        total = len(made.commands)
        left = [*range(1 + total)]
        for _ in range(target.batches):
            left = _living(name, target, unit, target.vectors(rng), left, seed)
        equal = {number for number in left[1:] if is_equivalent(made.original, made.commands[number - 1], Path(folder))}
    left = [mutant for mutant in left if mutant not in equal]
    killed = total - len(equal) - len(left[1:])
    row = {
        "bench": "mutation",
        "unit": name,
        "mutants": total,
        "killed": killed,
        "equivalent": len(equal),
        "kill_fraction": round(killed / max(total - len(equal), 1), 4),
    }
    return row, [made.commands[mutant - 1] for mutant in left[1:]]


def _living(
    name: str, target: Target, unit: StreamUnit | BurstUnit, vectors: Vectors, mutants: list[int], seed: int
) -> list[int]:
    """List the mutants, the original (0) first, that the vectors do not distinguish from the model."""
    if isinstance(unit, StreamUnit):
        for stalls in target.stalls:
            mutants = _streams_agree(unit, vectors, mutants, stalls, seed, target.cut_cycles)
    else:
        mutants = [mutant for mutant in mutants if _agrees(unit, vectors, mutant)]
    if 0 not in mutants:
        raise ConfigError(f"{name} must equal its model before it is mutated")
    return mutants


def _agrees(unit: BurstUnit, vectors: Vectors, mutant: int) -> bool:
    inputs, expected = vectors
    unit.reset()
    got = unit.run({**inputs, MUTANT: mutant})
    return all(np.array_equal(got[port], items) for port, items in expected.items())


def _streams_agree(
    unit: StreamUnit,
    vectors: Vectors,
    mutants: list[int],
    stalls: str | StallPattern,
    seed: int,
    cut_cycles: tuple[int, ...],
) -> list[int]:
    """List the mutants whose items are the model's and come in as many cycles as the first one's, the original."""
    inputs, expected = vectors
    streams = {stream: items for stream, items in inputs.items() if stream in unit.sources}
    counts = {stream: len(items) for stream, items in expected.items()}
    living: list[int] = []
    cycles: int | None = None
    for mutant in mutants:
        limit = None if cycles is None else 2 * cycles
        hold = {MUTANT: mutant} | {port: value for port, value in inputs.items() if port in unit.held}
        unit.reset_model()
        for some in cut_cycles:
            with suppress(SimulationTimeout, UnexpectedItems):
                unit.run(streams, counts, stalls="both", seed=seed, hold=hold, timeout_cycles=some, quiet_cycles=1)
        try:
            got = unit.run(streams, counts, stalls=stalls, seed=seed, hold=hold, timeout_cycles=limit)
        except (SimulationTimeout, UnexpectedItems):
            continue
        cycles = cycles or unit.cycles
        if unit.cycles == cycles and all(np.array_equal(got[port], items) for port, items in expected.items()):
            living.append(mutant)
    return living
