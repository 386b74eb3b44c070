"""Which layout of a cluster serves a model to so many users, or trains it: rows of all of them, the cheapest marked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nearflash.explore.studies.sweeps import row_of
from nearflash.explore.systems.cluster import Cluster
from nearflash.explore.systems.cluster_serving import LAYOUTS, first_token_seconds, replica_counts, serving_step
from nearflash.explore.systems.cluster_training import TRAINING_LAYOUTS, ClusterTraining, cluster_training_step
from nearflash.explore.systems.instinfer import Serving

__all__ = ["cluster_serving_rows", "cluster_training_rows"]


def cluster_serving_rows(
    serving: Serving, clusters: Sequence[Cluster], weight_bits: int = 16, rate: float = 0.0
) -> list[dict[str, Any]]:
    """A row for each cluster and layout, with the number of replicas whose tokens are the cheapest.

    rate: tokens a second that each user must get. `serves`: it fits and gives that; `best`: the cheapest token of
    those.
    """
    rows = [
        min(_serving_rows(serving, cluster, layout, weight_bits, rate), key=_preference)
        for cluster in clusters
        for layout in (LAYOUTS if cluster.drives else LAYOUTS[:-1])
    ]
    return _mark_cheapest(rows)


def _preference(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
    return not row["serves"], not row["fits"], row["usd_per_million"]


def _serving_rows(
    serving: Serving, cluster: Cluster, layout: str, weight_bits: int, rate: float
) -> Iterator[dict[str, Any]]:
    for replicas in replica_counts(cluster, layout):
        found = serving_step(serving, cluster, layout, replicas, weight_bits)
        yield row_of(
            found,
            layout=layout,
            hosts=cluster.hosts,
            drives=cluster.drives,
            replicas=replicas,
            users=serving.batch,
            tokens_per_user_second=1 / found.seconds,
            first_token_seconds=first_token_seconds(serving, cluster, cluster.all_gpus // replicas),
            serves=found.fits and 1 / found.seconds >= rate,
        )


def cluster_training_rows(
    model: str, clusters: Sequence[Cluster], optimizer: str = "adam", tokens: int = 16_384
) -> list[dict[str, Any]]:
    """A row for each cluster and layout. `best`: the cheapest token of those that fit."""
    rows = []
    for cluster in clusters:
        for layout in TRAINING_LAYOUTS if cluster.drives else TRAINING_LAYOUTS[:2]:
            found = cluster_training_step(ClusterTraining(model, layout, optimizer, tokens), cluster)
            rows.append(row_of(found, layout=layout, hosts=cluster.hosts, drives=cluster.drives, serves=found.fits))
    return _mark_cheapest(rows)


def _mark_cheapest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    least = min((row["usd_per_million"] for row in rows if row["serves"]), default=None)
    return [{**row, "best": row["serves"] and row["usd_per_million"] == least} for row in rows]
