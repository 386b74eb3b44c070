"""KVNAND: weights and KV in flash dies that multiply (in-flash computing, IFC), no DRAM; and its two baselines.

    C-x        weights and KV in the same x dies; generating QKV and attention follow one another over all dies
    D-(G1+G2)  weights in G1 dies, KV in G2: G1 generates QKV of a head group while G2 attends for the one before
    Base-1     weights in 8 IFC dies, KV in 8 channels of LPDDR5X, attention on the NPU
    Base-2     flash in place of that DRAM: KV crosses the flash interface to the NPU

A plane senses a page in tR while its multipliers take the page before; a matrix product also waits for its input on
every die's interface, for the first page, and for its output. Attention of a head group is K, logits out, softmax,
probabilities in, V. A page of K or V has one head's tokens. D has a group's pages over all planes of G2 and takes one
group at a time. C has each head's in that head's share of the planes: those of a head that waits stand idle, and heads
wait when the NPU's memory does not hold the logits of all. Pages are programmed when full, or when C's plane buffers
have no more room, and again before they were read too often. `Mechanisms` switches each of these off.

Source: KVNAND, its die, mapping and pipelining. The paper does not state the memory of logits: here
it is the NPU's 5 MB. Energy by bits moved; what computes is the same everywhere and not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

from nearflash.explore.energy import Energy
from nearflash.explore.links import DramMemory
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Npu
from nearflash.explore.systems.ifc import BASE_DIES, EVERY_MECHANISM, QUANTS, Arrangement, Decode, Die, Mechanisms
from nearflash.explore.tables import current_changes, read_part
from nearflash.explore.wear import SECONDS_PER_YEAR, erase_cycles

__all__ = ["best", "decode_step", "endurance_cycles", "splits"]

_SOFTMAX_OPERATIONS = 5
"""Maximum, difference, exponential, sum, quotient."""


@dataclass(frozen=True)
class _Parts:
    die: Die
    npu: Npu
    dram: DramMemory
    energy: Energy


@cache
def _parts_of(_changes: object) -> _Parts:
    return _Parts(read_part(Die, "kvnand"), read_part(Npu, "kvnand"), read_part(DramMemory, "lpddr5x"),
                  read_part(Energy, "flash-and-dram"))  # fmt: skip


def _parts() -> _Parts:
    return _parts_of(current_changes())


@dataclass(frozen=True)
class _Step:
    decode: Decode
    arrangement: Arrangement
    parts: _Parts
    has: Mechanisms


def decode_step(decode: Decode, arrangement: Arrangement, mechanisms: Mechanisms = EVERY_MECHANISM) -> Outcome:
    """One token. A model or context that does not fit gives an Outcome whose `fits` is false."""
    parts, shape = _parts(), decode.shape
    step = _Step(decode, arrangement, parts, mechanisms)
    logits = 2 * shape.layers * shape.heads * decode.context * decode.value_bytes
    phases, hidden = _ARRANGED[arrangement.kind](step, _products(step))
    held, capacity = _memory(decode, arrangement, parts)
    dram = capacity["KV"] if arrangement.kind == "Base-1" else 0.0
    return Outcome(
        system=arrangement.name,
        model=decode.model,
        phases=phases | {"refresh": _refresh(step)},
        hidden=hidden,
        energy_j=_energy(decode, arrangement, parts, logits),
        memory_bytes=held,
        capacity_bytes=capacity,
        parts={"npu": 1},
        flash_bytes=(sum(capacity.values()) - dram) * parts.die.price_factor,
        dram_bytes=dram,
        traffic_bytes={"weights": shape.active * QUANTS[decode.quant][0] / 8, "KV": decode.kv_bytes, "logits": logits},
        assumptions=("weights are striped evenly over all planes, KV of D too; in C, heads share the planes evenly",
                     "logits wait in the NPU's 5 MB: the paper does not state where", "ECC on the die keeps up",
                     "energy of computing is not counted", "of experts, a token reads those it is routed to"),
    )  # fmt: skip


def _products(step: _Step) -> dict[str, float]:
    """All QKV and all other weights, each product over all dies."""
    decode, die, shape = step.decode, step.parts.die, step.decode.shape
    bits, dies, value = QUANTS[decode.quant][0], step.arrangement.weights, decode.value_bytes
    return {
        "QKV": _product(die, shape.layers * shape.qkv, bits, dies, value, shape.layers * shape.hidden,
                        shape.layers * (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.layers),
        "other weights": _product(die, shape.active - shape.layers * shape.qkv, bits, dies, value,
                                  shape.layers * (shape.inputs - shape.hidden) + shape.hidden,
                                  shape.layers * shape.outputs, 3 * shape.layers + 1),
    }  # fmt: skip


def _product(
    die: Die, weights: float, bits: int, dies: int, value: float, inputs: float, outputs: float, products: int
) -> float:
    """Dependent matrix products: sensing, inputs on every die's interface, outputs over all, the first pages."""
    sensing = die.seconds(weights * bits / 8, bits, 1, dies)
    moved = inputs * value / die.link_bytes_per_s + outputs * value / (die.link_bytes_per_s * dies)
    return sensing + moved + products * die.read_us * 1e-6


def _on_npu(step: _Step, products: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """A baseline: the NPU reads all K and V."""
    decode, parts = step.decode, step.parts
    rate = parts.dram.bytes_per_s if step.arrangement.kind == "Base-1" else parts.die.link_bytes_per_s
    macs = decode.shape.group * decode.kv_bytes / decode.value_bytes
    attention = max(decode.kv_bytes / (BASE_DIES * rate), parts.npu.matrix_seconds(macs))
    softmax = parts.npu.vector_seconds(_SOFTMAX_OPERATIONS * decode.shape.layers * decode.shape.heads * decode.context)
    return products | {"attention": attention, "softmax": softmax}, {}


def _compact(step: _Step, products: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """C: every step follows the one before, attention for all heads that are at once."""
    shape, die = step.decode.shape, step.parts.die
    planes, heads = step.arrangement.kv_dies * die.planes_count, shape.kv_heads
    pages, sweeps = _pages_of_head(step), 1
    group = shape.group * step.decode.context * step.decode.value_bytes
    if step.has.bounded:
        at_once = int(step.parts.npu.buffer_bytes // group)
        sweeps = ceil(heads / at_once) if at_once else heads * ceil(group / step.parts.npu.buffer_bytes)
    share = planes // heads
    rounds = ceil(pages / share) if share else pages * ceil(heads / planes)
    if not step.has.confined:
        rounds = ceil(pages * heads * max(1, sweeps / heads) / planes)
        sweeps = 1
    phases = _attention(step, heads, sweeps * rounds, sweeps)
    program = _program(step)
    shown = {name: seconds * shape.layers for name, seconds in phases.items()} | {
        "KV program": program * step.has.contended
    }
    # Tensor-parallel QKV give each plane a piece of every head: new vectors cross to the planes that gather them.
    moved = 0.0 if step.has.confined else 2 * shape.kv * step.decode.value_bytes
    shown["KV gather"] = moved / (die.link_bytes_per_s * step.arrangement.kv_dies)
    return products | shown, {} if step.has.contended else {"KV program": program}


def _discrete(step: _Step, products: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """D: two stages, one head group at a time in each. The longer one counts, the other once, to fill or to drain."""
    shape, die = step.decode.shape, step.parts.die
    planes, layers, groups = step.arrangement.kv * die.planes_count, shape.layers, shape.kv_heads
    sweeps = 1
    if step.has.bounded:
        sweeps = ceil(shape.group * step.decode.context * step.decode.value_bytes / step.parts.npu.buffer_bytes)
    attend = _attention(step, 1, sweeps * ceil(_pages_of_head(step) / planes), sweeps)
    generate = _generate_group(step)
    hidden_groups = groups - 1 if step.has.pipelined else 0
    other = products["other weights"]
    program = _program(step)
    beyond = max(0.0, program - other) if step.has.contended else 0.0
    broadcast = layers * shape.hidden * step.decode.value_bytes / die.link_bytes_per_s
    shown_qkv, shown_attend = groups, groups
    if generate > sum(attend.values()):
        shown_attend = groups - hidden_groups
    else:
        shown_qkv = groups - hidden_groups
    phases = {"QKV": broadcast + layers * shown_qkv * generate, "other weights": other, "KV program": beyond}
    phases |= {name: layers * shown_attend * seconds for name, seconds in attend.items()}
    hidden = {"QKV": layers * (groups - shown_qkv) * generate, "KV program": program - beyond}
    return phases, hidden | {name: layers * (groups - shown_attend) * seconds for name, seconds in attend.items()}


_ARRANGED = {"C": _compact, "D": _discrete, "Base-1": _on_npu, "Base-2": _on_npu}


def _pages_of_head(step: _Step) -> int:
    """Pages of K of one head in one layer; as many of V."""
    decode = step.decode
    return ceil(decode.context * decode.shape.head_dim * decode.value_bytes / step.parts.die.page_bytes)


def _generate_group(step: _Step) -> float:
    """Q, K and V of a head group in one layer, tensor-parallel over all planes of G1, and out of the dies."""
    decode, die, shape = step.decode, step.parts.die, step.decode.shape
    bits, dies = QUANTS[decode.quant][0], step.arrangement.weights
    pages = shape.qkv / shape.kv_heads * bits / 8 / die.page_bytes
    results = (shape.group + 2) * shape.head_dim * decode.value_bytes / (die.link_bytes_per_s * dies)
    return ceil(pages / (dies * die.planes_count)) * die.page_s(bits, 1) + die.multiply_s(bits, 1) + results


def _attention(step: _Step, heads: int, rounds: int, sweeps: int) -> dict[str, float]:
    """Attention to `heads` KV heads of one layer: so many rounds of pages of K, as many of V, in so many sweeps."""
    decode, parts, shape = step.decode, step.parts, step.decode.shape
    die, bits = parts.die, QUANTS[step.decode.quant][1]
    queries = heads * shape.group
    sensing = 2 * rounds * die.page_s(bits, shape.group)
    vectors = 2 * queries * shape.head_dim * decode.value_bytes / die.link_bytes_per_s
    crossing = 2 * queries * decode.context * decode.value_bytes / (die.link_bytes_per_s * step.arrangement.kv_dies)
    return {
        "attention": sensing + 2 * sweeps * die.multiply_s(bits, shape.group) + vectors,
        "logits": max(0.0, crossing - sensing) if step.has.streamed else crossing,
        "softmax": parts.npu.vector_seconds(_SOFTMAX_OPERATIONS * queries * decode.context),
    }


def _program(step: _Step) -> float:
    die = step.parts.die
    pages = _pages_per_token(step.decode, step.arrangement, step.parts)
    return pages * die.program_us * 1e-6 / (step.arrangement.kv_dies * die.planes_count)


def _refresh(step: _Step) -> float:
    """Reading and programming what was read up to the limit: of every block, each page is read once a token."""
    if not step.has.refreshed:
        return 0.0
    decode, arrangement, die = step.decode, step.arrangement, step.parts.die
    weights = decode.shape.active * QUANTS[decode.quant][0] / 8 / arrangement.weights
    kv = 0.0 if arrangement.kind == "Base-1" else decode.kv_bytes / arrangement.kv_dies
    bytes_of_die = weights + kv if arrangement.kind == "C" else max(weights, kv)
    pages = bytes_of_die / (die.page_bytes * die.planes_count)
    return pages * (die.read_us + die.program_us) * 1e-6 * die.pages_per_block_count / die.read_limit_count


def _pages_per_token(decode: Decode, arrangement: Arrangement, parts: _Parts) -> float:
    """Pages programmed for a token: full ones, or more often where the buffers hold less than a page of each stream."""
    shape, die = decode.shape, parts.die
    streams = 2 * shape.kv_heads * shape.layers
    in_page = die.page_bytes / (shape.head_dim * decode.value_bytes)
    free_bytes = (
        parts.npu.buffer_bytes if arrangement.kind == "D" else arrangement.weights * die.planes_count * die.buffer_bytes
    )
    return streams / in_page * max(1.0, streams * die.page_bytes / free_bytes)


def _energy(decode: Decode, arrangement: Arrangement, parts: _Parts, logits: float) -> dict[str, float]:
    shape, die = decode.shape, parts.die
    weights = shape.active * QUANTS[decode.quant][0] / 8 * die.with_spare
    vectors = (shape.layers * (shape.inputs + shape.outputs)) * decode.value_bytes
    new = shape.kv * decode.value_bytes
    if arrangement.kind == "Base-1":
        return dict(parts.energy.joules(read=weights, interface=vectors, dram=decode.kv_bytes + new))
    kv = decode.kv_bytes * die.with_spare
    pages = _pages_per_token(decode, arrangement, parts) * (die.page_bytes + die.spare_bytes)
    crossing = decode.kv_bytes if arrangement.kind == "Base-2" else logits
    return dict(parts.energy.joules(read=weights + kv, programmed=pages, interface=vectors + new + crossing))


def _memory(decode: Decode, arrangement: Arrangement, parts: _Parts) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes held, and what there is."""
    flash = parts.die.flash_bytes
    if arrangement.kind == "C":
        return {"dies": decode.weight_bytes + decode.kv_bytes}, {"dies": arrangement.weights * flash}
    kv = {"D": arrangement.kv * flash, "Base-1": BASE_DIES * parts.dram.channel_bytes, "Base-2": BASE_DIES * flash}
    held = {"weight dies": decode.weight_bytes, "KV": decode.kv_bytes}
    return held, {"weight dies": arrangement.weights * flash, "KV": kv[arrangement.kind]}


def splits(dies: int) -> Iterator[Arrangement]:
    """C and every D of so many dies."""
    yield Arrangement("C", dies)
    for weights in range(1, dies):
        yield Arrangement("D", weights, dies - weights)


def best(decode: Decode, dies: int = 16, kind: str = "", mechanisms: Mechanisms = EVERY_MECHANISM) -> Outcome | None:
    """The fastest arrangement that fits, of C and D or of one kind; None where none fits."""
    every = (
        decode_step(decode, arrangement, mechanisms) for arrangement in splits(dies) if kind in ("", arrangement.kind)
    )
    return min((outcome for outcome in every if outcome.fits), key=lambda each: each.seconds, default=None)


def endurance_cycles(decode: Decode, tokens_per_s: float, years: float) -> float:
    """Program and erase cycles after so many years of decoding, of flash reserved for K and V of `decode.context`.

    All of its blocks are written in turn. Source: KVNAND's endurance.
    """
    written = decode.shape.kv * decode.value_bytes * tokens_per_s
    return erase_cycles(written, decode.kv_bytes, years * SECONDS_PER_YEAR)
