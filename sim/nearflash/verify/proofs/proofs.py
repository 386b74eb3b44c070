"""The registry of proofs: benches of every stream element and bus component, with small parameters.

The parameters are small because the components are regular in them: a queue of 3 places has every kind of state of one
with 500 (empty, one item, full, both pointers wrapped), a burst of 4 beats on a 32-bit bus meets its 16-byte boundary
as one of 64 meets 4 KB. What is proven is proven for these parameters only; the tests cover others by simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nearflash.verify.proofs import (
    bitmap,
    bus,
    dequantize,
    header,
    merge,
    nand,
    ones,
    pack,
    parser,
    streams,
    tiles,
    topk,
    unpack,
    values,
    write_arbiter,
)
from nearflash.verify.proofs.proof import Bench

__all__ = ["PROOFS", "Proof"]


@dataclass(frozen=True)
class Proof:
    """One proof: `build` makes its bench; `engine` is "induction" (of `depth` cycles), "pdr", or "bounded".

    Bounded: the properties hold in the first `depth` cycles. The bench must prove that what it is about ends by then.
    """

    name: str
    build: Callable[[], Bench]
    engine: str = "pdr"
    depth: int = 12
    cover_depth: int = 20


PROOFS = {
    proof.name: proof
    for proof in (
        Proof("stream.skid", streams.skid),
        Proof("stream.queue.distributed", lambda: streams.queue("distributed")),
        Proof("stream.queue.block", lambda: streams.queue("block")),
        Proof("stream.credit", streams.credit),
        Proof("stream.fork", streams.fork),
        Proof("stream.join", streams.join),
        Proof("stream.narrow", streams.narrow),
        Proof("stream.widen", streams.widen),
        Proof("bus.split", bus.splitter, engine="induction", depth=3),
        Proof("bus.read", bus.reader),
        Proof("bus.write", bus.writer),
        Proof("bus.arbiter", bus.arbiter),
        Proof("bus.write_arbiter", write_arbiter.write_arbiter),
        Proof("bus.control", bus.control),
        Proof("bus.registers", bus.registers, engine="induction", depth=3),
        Proof("nfc.runs", nand.runs),
        Proof("nfc.phrase", nand.phrase),
        Proof("nfc.seal_check", nand.seal_check),
        Proof("nfc.encoder", nand.encoder),
        Proof("nfc.progress", nand.progress, engine="induction", depth=3),
        Proof("expand.bitmap", bitmap.bitmap, engine="induction", depth=6),
        Proof("expand.dequantize", dequantize.dequantize),
        Proof("expand.header", header.header, engine="induction", depth=3),
        Proof("expand.merge", merge.merge, engine="induction", depth=2),
        Proof("expand.ones", ones.ones, engine="induction", depth=1),
        Proof("expand.pack", pack.pack, engine="induction", depth=2),
        Proof("expand.parser", parser.parser, engine="induction", depth=2, cover_depth=40),
        Proof("expand.tiles", tiles.tiles, engine="induction", depth=2),
        Proof("expand.unpack", unpack.unpack, engine="induction", depth=3),
        Proof("expand.values", values.values, engine="induction", depth=3),
        Proof("topk.selector", topk.selector, engine="bounded", depth=topk.RUN_CYCLES + 2, cover_depth=topk.RUN_CYCLES),
    )
}
