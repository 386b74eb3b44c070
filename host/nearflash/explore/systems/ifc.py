"""Parts of in-flash computing (IFC): a die that multiplies beside each plane, arrangements of dies, mechanisms.

Source: KVNAND, its die, mapping and pipelining.
"""

from dataclasses import dataclass, fields
from math import exp

from nearflash.abi.errors import PlanError
from nearflash.explore.shapes import Decoder, decoder

__all__ = ["BASE_DIES", "EVERY_MECHANISM", "MECHANISMS", "QUANTS", "Arrangement", "Decode", "Die", "Mechanisms"]

QUANTS = {"w16a16": (16, 16), "w8a8": (8, 8), "w4a16": (4, 16)}
"""Bits of a weight, and of activations and KV."""
BASE_DIES = 8
"""Dies and memory channels of the baselines."""


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
    read_limit_count: int
    area_mm2: float
    fmac_um2: float
    buffer_mm2_per_mbit: float
    defects_per_cm2: float

    @property
    def price_factor(self) -> float:
        """Price over that of the same flash without multipliers and buffers: fewer dies on a wafer, fewer good ones.

        Good ones by Poisson's rule: the exponential of area times defects.
        """
        fmacs = self.planes_count * self.fmac_count * self.fmac_um2 * 1e-6
        added = fmacs + self.planes_count * self.buffer_bytes * 8 / 2**20 * self.buffer_mm2_per_mbit
        return (1 + added / self.area_mm2) * exp(added / 100 * self.defects_per_cm2)

    @property
    def flash_bytes(self) -> int:
        """Data that it holds."""
        return self.planes_count * self.blocks_per_plane_count * self.pages_per_block_count * self.page_bytes

    @property
    def with_spare(self) -> float:
        """Bytes sensed for each byte of data."""
        return 1 + self.spare_bytes / self.page_bytes

    def multiply_s(self, bits: int, reuse: int) -> float:
        """Seconds of multiplying the elements of a page, each `reuse` times."""
        return self.page_bytes * 8 / bits * reuse / (self.fmac_count * self.clock_hz)

    def page_s(self, bits: int, reuse: int) -> float:
        """Seconds between two pages of a plane, which senses one while it multiplies the one before."""
        return max(self.read_us * 1e-6, self.multiply_s(bits, reuse))

    def seconds(self, data_bytes: float, bits: int, reuse: int, dies: int) -> float:
        """Seconds of multiplying sensed data, each element `reuse` times, striped over all planes of the dies."""
        return data_bytes / (dies * self.planes_count * self.page_bytes) * self.page_s(bits, reuse)


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
class Mechanisms:
    """The paper's mechanisms that a step has; each can be switched off, to ask what it gives.

    pipelined: D generates QKV of the next head group beside attention to this one. confined: in C, whose QKV are
    head-parallel, the pages of a KV head lie in its share of the planes alone; else over all of them. bounded: heads
    whose logits the NPU's memory does not hold wait for the others. streamed: logits and probabilities cross the
    interface while planes sense. contended: a plane that programs does not sense. refreshed: blocks are written again
    when they were read as often as their cells stand.
    """

    pipelined: bool = True
    confined: bool = True
    bounded: bool = True
    streamed: bool = True
    contended: bool = True
    refreshed: bool = True

    def without(self, *names: str) -> "Mechanisms":
        """The same with these off. Raises PlanError for a name that is none of them."""
        for name in names:
            if name not in MECHANISMS:
                raise PlanError(f"mechanism must be one of {', '.join(MECHANISMS)}, not {name!r}")
        return Mechanisms(**{name: getattr(self, name) and name not in names for name in MECHANISMS})


MECHANISMS = tuple(each.name for each in fields(Mechanisms))
"""Names of the switches."""
EVERY_MECHANISM = Mechanisms()
"""As the paper has it."""
