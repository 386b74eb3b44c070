"""KVNAND: weights and KV in flash dies that multiply (in-flash computing, IFC), no DRAM; and its two baselines.

    C-x        weights and KV in the same x dies; every step follows the one before
    D-(G1+G2)  weights in G1 dies, KV in G2; QKV of the next head group, attention of this one and its softmax overlap
    Base-1     weights in 8 IFC dies, KV in 8 channels of LPDDR5X, attention on the NPU
    Base-2     flash in place of that DRAM: KV crosses the flash interface to the NPU

A plane senses a page in tR while its multipliers take the page before; a matrix product also waits for its input on
every die's interface, for the first page, and for its output. Attention moves logits out and probabilities in, a value
for each query head and token. Pages of K and V are programmed when full, or when C's plane buffers have no more room.

Source: KVNAND (explore.md, section 2.4). Energy by bits moved; what computes is the same everywhere and not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from nearflash.abi.errors import PlanError
from nearflash.explore.energy import Energy
from nearflash.explore.links import DramMemory
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Npu
from nearflash.explore.shapes import Decoder, decoder
from nearflash.explore.tables import current_changes, read_part
from nearflash.explore.wear import SECONDS_PER_YEAR, erase_cycles

__all__ = ["BASE_DIES", "QUANTS", "Arrangement", "Decode", "Die", "best", "decode_step", "endurance_cycles",
           "splits"]  # fmt: skip

QUANTS = {"w16a16": (16, 16), "w8a8": (8, 8), "w4a16": (4, 16)}
"""Bits of a weight, and of activations and KV."""
BASE_DIES = 8
"""Dies and memory channels of the baselines."""
_SOFTMAX_OPERATIONS = 5
"""Maximum, difference, exponential, sum, quotient."""


@dataclass(frozen=True)
class Die:
    """A flash die that multiplies beside each plane."""

    source: str
    planes_count: int
    page_bytes: int
    spare_bytes: int
    pages_per_block_count: int
    blocks_per_plane_count: int
    read_us: float
    program_us: float
    fmac_count: int
    clock_hz: float
    link_bytes_per_s: float
    buffer_bytes: int
    endurance_count: int

    @property
    def flash_bytes(self) -> int:
        """Data that it holds."""
        return self.planes_count * self.blocks_per_plane_count * self.pages_per_block_count * self.page_bytes

    @property
    def with_spare(self) -> float:
        """Bytes sensed for each byte of data."""
        return 1 + self.spare_bytes / self.page_bytes

    def seconds(self, data_bytes: float, bits: int, reuse: int, dies: int) -> float:
        """Seconds of multiplying sensed data, each element `reuse` times, striped over all planes of the dies."""
        elements = self.page_bytes * 8 / bits
        page_s = max(self.read_us * 1e-6, elements * reuse / (self.fmac_count * self.clock_hz))
        return data_bytes / (dies * self.planes_count * self.page_bytes) * page_s


@dataclass(frozen=True)
class Arrangement:
    """Dies: weights in `weights`, KV in `kv`, 0 where they share the dies; or a baseline. Raises PlanError."""

    kind: str
    weights: int = BASE_DIES
    kv: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("C", "D", "Base-1", "Base-2"):
            raise PlanError(f"kind must be C, D, Base-1 or Base-2, not {self.kind!r}")
        if self.weights < 1 or self.kv < 0 or (self.kind == "D") != (self.kv > 0):
            raise PlanError(
                f"dies must be 1 or more for weights, and for KV in D alone, not {self.weights} and {self.kv}"
            )

    @property
    def name(self) -> str:
        """As the paper writes it."""
        return {"C": f"C-{self.weights}", "D": f"D-({self.weights}+{self.kv})"}.get(self.kind, self.kind)

    @property
    def kv_dies(self) -> int:
        """Dies that hold KV."""
        return self.kv if self.kind == "D" else self.weights


@dataclass(frozen=True)
class Decode:
    """One token of one sequence. Raises PlanError for another quantisation or an empty context."""

    model: str
    context: int
    quant: str = "w16a16"

    def __post_init__(self) -> None:
        if self.quant not in QUANTS:
            raise PlanError(f"quant must be one of {', '.join(QUANTS)}, not {self.quant!r}")
        if self.context < 1:
            raise PlanError(f"context must be 1 token at least, not {self.context}")

    @property
    def shape(self) -> Decoder:
        """Shape of the model."""
        return decoder(self.model)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.shape.parameters * QUANTS[self.quant][0] / 8

    @property
    def value_bytes(self) -> float:
        """Bytes of an activation, or of an element of K or V."""
        return QUANTS[self.quant][1] / 8

    @property
    def kv_bytes(self) -> float:
        """Bytes of the context's K and V."""
        return self.shape.kv * self.value_bytes * self.context


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


def decode_step(decode: Decode, arrangement: Arrangement) -> Outcome:
    """One token. A model or context that does not fit gives an Outcome whose `fits` is false."""
    parts, shape = _parts(), decode.shape
    bits = QUANTS[decode.quant][0]
    dies = arrangement.weights
    die, value = parts.die, decode.value_bytes
    products = {
        "QKV": _product(die, shape.layers * shape.qkv, bits, dies, value, shape.layers * shape.hidden,
                        shape.layers * (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.layers),
        "other weights": _product(die, shape.active - shape.layers * shape.qkv, bits, dies, value,
                                  shape.layers * (shape.inputs - shape.hidden) + shape.hidden,
                                  shape.layers * shape.outputs, 3 * shape.layers + 1),
    }  # fmt: skip
    logits = 2 * shape.layers * shape.heads * decode.context * value
    softmax = parts.npu.vector_seconds(_SOFTMAX_OPERATIONS * shape.layers * shape.heads * decode.context)
    if arrangement.kind.startswith("Base"):
        phases = products | _base_attention(decode, arrangement, parts) | {"softmax": softmax}
        hidden: dict[str, float] = {}
    else:
        phases, hidden = _flash_attention(decode, arrangement, parts, products, logits, softmax)
    held, capacity = _memory(decode, arrangement, parts)
    return Outcome(
        system=arrangement.name,
        model=decode.model,
        phases=phases,
        hidden=hidden,
        energy_j=_energy(decode, arrangement, parts, logits),
        memory_bytes=held,
        capacity_bytes=capacity,
        traffic_bytes={"weights": shape.active * bits / 8, "KV": decode.kv_bytes, "logits": logits},
        assumptions=("weights and KV are striped evenly over all planes", "ECC on the die keeps up with sensing",
                     "energy of computing is not counted", "of experts, a token reads those it is routed to"),
    )  # fmt: skip


def _product(
    die: Die, weights: float, bits: int, dies: int, value: float, inputs: float, outputs: float, products: int
) -> float:
    """Dependent matrix products: sensing, inputs on every die's interface, outputs over all, the first pages."""
    sensing = die.seconds(weights * bits / 8, bits, 1, dies)
    moved = inputs * value / die.link_bytes_per_s + outputs * value / (die.link_bytes_per_s * dies)
    return sensing + moved + products * die.read_us * 1e-6


def _base_attention(decode: Decode, arrangement: Arrangement, parts: _Parts) -> dict[str, float]:
    rate = parts.dram.bytes_per_s if arrangement.kind == "Base-1" else parts.die.link_bytes_per_s
    macs = decode.shape.group * decode.kv_bytes / decode.value_bytes
    return {"attention": max(decode.kv_bytes / (BASE_DIES * rate), parts.npu.matrix_seconds(macs))}


def _flash_attention(
    decode: Decode, arrangement: Arrangement, parts: _Parts, products: dict[str, float], logits: float, softmax: float
) -> tuple[dict[str, float], dict[str, float]]:
    die, shape, dies = parts.die, decode.shape, arrangement.kv_dies
    bits = QUANTS[decode.quant][1]
    vectors = 2 * shape.layers * shape.heads * shape.head_dim * decode.value_bytes
    attention = die.seconds(decode.kv_bytes, bits, shape.group, dies)
    attention += vectors / die.link_bytes_per_s + 2 * shape.layers * die.read_us * 1e-6
    transfer = logits / (die.link_bytes_per_s * dies)
    pages = _pages_per_token(decode, arrangement, parts)
    program = pages * die.program_us * 1e-6 / (dies * die.planes_count)
    if arrangement.kind == "C":
        return products | {"attention": attention, "logits": transfer, "softmax": softmax, "KV program": program}, {}
    # One head group at a time in each of the stages: the longest counts, the others once, to fill the pipeline.
    stages = {"QKV": products["QKV"], "attention": attention, "logits": transfer, "softmax": softmax}
    longest = max(stages, key=stages.__getitem__)
    other_stages = {name: part for name, part in stages.items() if name != longest}
    shown = {name: part / shape.kv_heads for name, part in other_stages.items()}
    phases = {"other weights": products["other weights"], longest: stages[longest], **shown}
    return phases, {name: part - shown[name] for name, part in other_stages.items()} | {"KV program": program}


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


def best(decode: Decode, dies: int = 16, kind: str = "") -> Outcome | None:
    """The fastest arrangement that fits, of C and D or of one kind; None where none fits."""
    every = (decode_step(decode, arrangement) for arrangement in splits(dies) if kind in ("", arrangement.kind))
    return min((outcome for outcome in every if outcome.fits), key=lambda each: each.seconds, default=None)


def endurance_cycles(decode: Decode, tokens_per_s: float, flash_bytes: float, years: float) -> float:
    """Program and erase cycles of what the weights leave of the flash, after so many years of decoding."""
    written = decode.shape.kv * decode.value_bytes * tokens_per_s
    return erase_cycles(written, flash_bytes - decode.weight_bytes, years * SECONDS_PER_YEAR)
