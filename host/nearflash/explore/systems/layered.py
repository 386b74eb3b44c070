"""Offloaded inference by layers: each lies in GPU memory, host memory or on a drive, and is loaded before it computes.

Loading, copying, expanding and computing follow one another, as in accelerate's hooks. Source of the setup and of its
figures: Endor (arXiv 2406.11674); bytes of a bitmap: an eighth of a byte an element and the values that are not zero.
"""

from dataclasses import dataclass

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Gpu, Runtime
from nearflash.explore.shapes import Decoder, decoder
from nearflash.explore.tables import read_part

__all__ = ["Expander", "LayeredHost", "Placement", "bitmap_fraction", "layer_pass"]


_ASSUMPTIONS = (
    "loading, copying, expanding and computing follow one another",
    "one small batch: compute is bound by GPU memory",
    "direct transfers run at the drive's rate",
)


@dataclass(frozen=True)
class Expander:
    """Hardware that expands compressed weights; bytes of dense weights a second."""

    source: str
    output_bytes_per_s: float


@dataclass(frozen=True)
class Placement:
    """Layers by tier. Raises PlanError for negative counts or for none."""

    gpu: int = 0
    cpu: int = 0
    ssd: int = 0

    def __post_init__(self) -> None:
        if min(self.gpu, self.cpu, self.ssd) < 0 or not self.layers:
            raise PlanError(f"layers must be 0 or more on each tier and 1 in all, not {self}")

    @property
    def layers(self) -> int:
        """All of them."""
        return self.gpu + self.cpu + self.ssd


@dataclass(frozen=True)
class LayeredHost:
    """The machine: its GPU, its link from pageable memory, its software, and what expands."""

    gpu: Gpu
    link: Link
    runtime: Runtime
    expander: Expander
    host_bytes: float = 64e9

    @classmethod
    def endor(cls) -> "LayeredHost":
        """Endor's: an RTX 4080."""
        return cls(
            read_part(Gpu, "rtx4080"),
            read_part(Link, "pcie4-x16-pageable"),
            read_part(Runtime, "accelerate"),
            read_part(Expander, "endor-rtx4080"),
        )


def bitmap_fraction(bits: int = 16, density: float = 0.5) -> float:
    """Bytes of a bitmap and its values, of the dense bytes at that width. Raises PlanError for other widths."""
    if bits not in (4, 8, 16) or not 0 <= density <= 1:
        raise PlanError(f"bits must be 4, 8 or 16 and density between 0 and 1, not {bits} and {density}")
    return density + 1 / bits


def layer_pass(
    model: str,
    placement: Placement,
    host: LayeredHost,
    *,
    stored_fraction: float = 1.0,
    bits: int = 16,
    direct: bool = False,
) -> Outcome:
    """One pass over the placed layers with a small batch. direct: from the drive to the GPU, not through host memory.

    stored_fraction: bytes kept of dense ones; below 1, every layer is expanded on the GPU. Raises PlanError for more
    layers than the model has.
    """
    shape = decoder(model)
    if placement.layers > shape.layers:
        raise PlanError(f"layers must be {shape.layers} at most for {model}, not {placement.layers}")
    dense = shape.layer_parameters * bits / 8
    stored = dense * stored_fraction
    read = placement.ssd * stored
    copied = placement.cpu * stored + (0 if direct else read)
    expands = stored_fraction < 1
    phases = {
        "drive": read / host.runtime.read_bytes_per_s,
        "host to GPU": host.link.seconds(copied),
        "expand": placement.layers * dense / host.expander.output_bytes_per_s if expands else 0.0,
        "compute": placement.layers * host.gpu.seconds(0, dense),
        "runtime": placement.layers * host.runtime.layer_s,
    }
    return Outcome(
        system=_name(stored_fraction, direct),
        model=model,
        phases=phases,
        memory_bytes=_memory(shape, placement, stored, dense),
        capacity_bytes={"GPU": host.gpu.memory_bytes, "host": host.host_bytes},
        parts={"rtx4080": 1, "host": 1, "ssd": 1},
        traffic_bytes={"drive": read, "host link": copied + (read if direct else 0)},
        assumptions=_ASSUMPTIONS,
    )


def _name(stored_fraction: float, direct: bool) -> str:
    stored = "dense" if stored_fraction == 1 else f"compressed to {stored_fraction:.3g}"
    return stored + (", drive to GPU" if direct else "")


def _memory(shape: Decoder, placement: Placement, stored: float, dense: float) -> dict[str, float]:
    working = dense + (stored if stored < dense else 0)
    return {
        "GPU": placement.gpu * stored + working + 2 * shape.head,
        "host": placement.cpu * stored + stored,
        "drive": placement.ssd * stored,
    }
