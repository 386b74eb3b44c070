"""The stages of a pipeline: the layers of each rank, the batches that it computes at a time, and where its bytes lie.

FlexGen (arXiv 2303.06865), section 4.4: the layers are divided evenly, and a rank is a machine with a smaller model.
The runtime (nearflash.offload.schedule.pipeline) divides by the same functions, and loads a layer once a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from nearflash.abi.errors import CommandError
from nearflash.planning.placement import place_units
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.shapes import ModelShape

__all__ = ["STATES_SENT", "TOKENS_SENT", "StageShape", "group_sizes", "place_on_stage", "split_layers", "stage_shapes"]

STATES_SENT, TOKENS_SENT = "activations rank to rank", "tokens rank to rank"
"""Links between ranks; bytes count where they are sent."""


@dataclass(frozen=True)
class StageShape(ModelShape):
    """A rank's layers, `first` to `end` (half open), as a model of its own: every rank has the embedding and the head
    in memory, the last one alone multiplies by the head.
    """

    rank: int = 0
    ranks: int = 1
    first: int = 0
    end: int = 0

    @property
    def sends(self) -> bool:
        """Whether its hidden states go to another rank."""
        return self.rank < self.ranks - 1

    @property
    def state_waits(self) -> int:
        """Layers before which hidden states wait: its own, and the first one of the next rank."""
        return len(self.layers) + self.sends

    @property
    def name(self) -> str:
        """The rank and its layers, for people."""
        return f"rank {self.rank} of {self.ranks}, layers {self.first} to {self.end - 1}"


def split_layers(layers: int, ranks: int) -> list[int]:
    """The first layer of each rank, and the number of layers. Raises CommandError for fewer layers than ranks."""
    if not 0 < ranks <= layers:
        raise CommandError(f"ranks must be between 1 and {layers}, one for each layer, not {ranks}")
    return [layers * rank // ranks for rank in range(ranks + 1)]


def group_sizes(num_batches: int, ranks: int) -> list[int]:
    """Batches of each group that passes the ranks by itself; no more groups than batches."""
    return [len(range(first, num_batches, ranks)) for first in range(min(ranks, num_batches))]


def stage_shapes(shape: ModelShape, ranks: int) -> list[StageShape]:
    """The shape of each rank. Raises CommandError as `split_layers`."""
    bounds = split_layers(len(shape.layers), ranks)
    return [_stage(shape, rank, bounds) for rank in range(ranks)]


def _stage(shape: ModelShape, rank: int, bounds: Sequence[int]) -> StageShape:
    first, end = bounds[rank : rank + 2]
    whole = {each.name: getattr(shape, each.name) for each in fields(shape)}
    whole |= {"layers": shape.layers[first:end], "rank": rank, "ranks": len(bounds) - 1, "first": first, "end": end}
    stage = StageShape(**whole)
    if not stage.sends:
        return stage
    return replace(stage, head=0, tied=True, embedding=shape.embedding + (0 if shape.tied else shape.head))


def place_on_stage(shape: ModelShape, policy: OffloadPolicy, stage: StageShape) -> OffloadPolicy:
    """A policy with the shares that a rank's own layers, caches and batches get of it, whole ones as they are."""
    owned = [stage.first <= number < stage.end for number in range(len(shape.layers))]
    weights = [layer.parameters * own for layer, own in zip(shape.layers, owned, strict=True)]
    caches = [layer.kv * own for layer, own in zip(shape.layers, owned, strict=True) for _ in range(policy.num_batches)
              if layer.kv]  # fmt: skip
    return replace(
        policy,
        weights=_place(policy.weights, weights),
        cache=_place(policy.cache, caches),
        activations=_place(policy.activations, [1] * policy.num_batches),
    )


def _place(shares: Shares, sizes: Sequence[int]) -> Shares:
    total = sum(sizes)
    if not total:
        return shares
    placed: dict[str, int] = {}
    for tier, size in zip(place_units(shares, sizes), sizes, strict=True):
        placed[tier] = placed.get(tier, 0) + size
    return Shares(**{tier: size / total for tier, size in placed.items()})
