"""The units that are mutated, with the vectors that have to notice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.sim.stalls import Stall, Stalls
from nearflash.verify.mutants import (
    bitmap,
    code_product,
    coded,
    dequantize,
    header,
    mac,
    ones,
    pack,
    pairs,
    parser,
    selector,
    state,
    tiles,
    unpack,
)
from nearflash.verify.mutants import filter as beat_filter

__all__ = ["TARGETS", "Target", "Vectors"]

#: Inputs, and what the model expects at the outputs: port (or stream) -> array, as BurstUnit (or StreamUnit) takes it;
#: of a component with streams, other inputs are held: one value each.
Vectors = tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Target:
    """A unit, its vectors, and how many mutants to make.

    Outputs are compared at every vector: a component whose outputs mean something only sometimes comes in a wrapper
    that makes them zero otherwise, and mutants are only in `part`, the submodule that it wraps. `stalls`: patterns
    under which a stream component runs; none for others. `batches`: how often vectors are drawn, for those mutants that
    have lived so far. `cut_cycles`: runs that come before each one, cut off by a reset after so many cycles, for a
    component whose reset drops everything.
    """

    component: Callable[[], Any]
    vectors: Callable[[np.random.Generator], Vectors]
    mutants: int = 300
    part: str = ""
    stalls: tuple[str | Stalls, ...] = ()
    batches: int = 1
    cut_cycles: tuple[int, ...] = ()


#: Pages that come late, so that what is planned ahead runs out, and behind one another.
_LATE = Stalls(named={"i_page": Stall(99, burst_cycles=300)})
TARGETS: dict[str, Target] = {
    "num.mac": Target(mac.ObservedMac, mac.vectors, part="mac"),
    "attn.filter": Target(
        beat_filter.ObservedFilter, beat_filter.vectors, part="filter", stalls=("none", "both", _LATE), batches=6
    ),
    "expand.bitmap": Target(
        bitmap.expander, bitmap.vectors, part="inner", stalls=("none", "both"), batches=6, cut_cycles=(9, 20, 33)
    ),
    "expand.coded": Target(
        coded.values, coded.vectors, part="inner", stalls=("none", "both"), batches=8, cut_cycles=(9, 20, 33)
    ),
    "expand.code_product": Target(code_product.ObservedProduct, code_product.vectors, part="product", batches=3),
    "expand.dequantize": Target(
        dequantize.ObservedDequantizer,
        dequantize.vectors,
        part="inner",
        stalls=("none", "both"),
        batches=40,
        cut_cycles=(9, 20, 33),
    ),
    "expand.header": Target(
        header.ObservedHeader,
        header.vectors,
        part="inner",
        stalls=("none", "both"),
        batches=40,
        cut_cycles=(3, 5, 9, 20, 33),
    ),
    "expand.tiles": Target(
        tiles.ObservedTiles, tiles.vectors, part="inner", stalls=("none", "both"), batches=60, cut_cycles=(3, 9, 20, 33)
    ),
    "expand.pairs": Target(
        pairs.ObservedMerge, pairs.vectors, part="inner", stalls=("none", "both"), batches=30, cut_cycles=(9, 20, 33)
    ),
    "expand.ones": Target(ones.ObservedCount, ones.vectors, part="inner", batches=5),
    "expand.pack": Target(
        pack.packer, pack.vectors, part="inner", stalls=("none", "both"), batches=12, cut_cycles=(9, 20, 33)
    ),
    "expand.parser": Target(
        parser.parser, parser.vectors, part="inner", stalls=("none", "both"), batches=24, cut_cycles=(9, 20, 33, 300)
    ),
    "expand.unpack": Target(
        unpack.unpacker, unpack.vectors, part="inner", stalls=("none", "both"), batches=10, cut_cycles=(9, 20, 33)
    ),
    "update.state_encoder": Target(
        state.encoder, state.encoder_vectors, part="inner", stalls=("none", "both"), batches=12, cut_cycles=(9, 20, 33)
    ),
    "update.state_decoder": Target(
        state.decoder, state.decoder_vectors, part="inner", stalls=("none", "both"), batches=10, cut_cycles=(9, 20, 33)
    ),
    "topk.selector": Target(selector.selector, selector.vectors, stalls=("none", "both"), batches=15),
}
