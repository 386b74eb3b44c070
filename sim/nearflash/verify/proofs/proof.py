"""Description of a proof: a harness, and how it is proven.

Parameters of components under proof are small because the components are regular in them: a queue of 3 places has every
kind of state of one with 500 (empty, one item, full, both pointers wrapped), a burst of 4 beats on a 32-bit bus meets
its 16-byte boundary as one of 64 meets 4 KB. What is proven is proven for these parameters only; the tests cover others
by simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nearflash.verify.proofs.harness import ProofHarness

__all__ = ["Proof"]


@dataclass(frozen=True)
class Proof:
    """One proof: `build` makes its harness; `engine` is "induction" (of `depth` cycles), "pdr", or "bounded".

    Bounded: the properties hold in the first `depth` cycles. The harness must prove that the run it describes ends by
    then.
    """

    build: Callable[[], ProofHarness]
    engine: str = "pdr"
    depth: int = 12
    cover_depth: int = 20
