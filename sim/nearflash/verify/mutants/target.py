"""Description of a unit for mutation: the component, vectors that must detect its mutants, and how they run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.sim.stalls import StallPattern

__all__ = ["Target", "Vectors"]

#: Inputs, and what the model expects at the outputs: port (or stream) -> array, as BurstUnit (or StreamUnit) takes it;
#: of a component with streams, other inputs are held: one value each.
Vectors = tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Target:
    """A unit, its vectors, and how many mutants to make.

    Outputs are compared at every vector: a component whose outputs mean something only sometimes comes in a wrapper
    that makes them zero otherwise, and mutants are only in `part`, the submodule that it wraps. `stalls`: patterns
    under which a stream component runs; none for others. `batches`: how many batches of random vectors run, on those
    mutants that have lived so far. `cut_cycles`: runs that come before each one, cut off by a reset after so many
    cycles, for a component whose reset drops everything.
    """

    component: Callable[[], Any]
    vectors: Callable[[np.random.Generator], Vectors]
    mutants: int = 300
    part: str = ""
    stalls: tuple[str | StallPattern, ...] = ()
    batches: int = 1
    cut_cycles: tuple[int, ...] = ()
