"""A model served to users by a cluster, in the layouts of engines that users have.

| layout | GPUs of a host | hosts | K and V | engines |
|---|---|---|---|---|
| GPU memory | tensor parallel | pipeline | in GPU memory | vLLM, SGLang |
| host memory | pipeline | pipeline | in host memory, the CPU attends | nearflash, FlexGen's CPU attention |
| drives | pipeline | pipeline | on drives that compute, page selection | nearflash |

In a pipeline as many parts of the batch are under way as there are stages, twice as many with drives: one part is on
the GPU while the drives attend for another. A replica is a set of GPUs that has all weights; users are divided among
replicas. All layouts get the same share of a GPU's peak.

Source: page selection by the engine's measured cycles (systems.nearflash); the schedule is ours.
"""

import math
from dataclasses import dataclass, replace

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Cpu, Gpu, Runtime
from nearflash.explore.systems.cluster import Cluster, Network
from nearflash.explore.systems.instinfer import KvShare, Serving
from nearflash.explore.systems.nearflash import sparf_page_step
from nearflash.explore.systems.smart_infinity import SmartSsd
from nearflash.explore.tables import read_part

__all__ = ["LAYOUTS", "first_token_seconds", "replica_counts", "serving_step"]

LAYOUTS = ("GPU memory", "host memory", "drives")
_ASSUMPTIONS = (
    "all layouts reach the same share of a GPU's peak",
    "prompts are computed between decode steps, by all GPUs of a replica",
    "users are divided evenly, their contexts are alike",
)


@dataclass(frozen=True)
class _Replica:
    """A set of GPUs with all weights: how its users run through it."""

    serving: Serving
    gpus: int
    tensor: int
    hosts: float
    halves: bool

    @property
    def stages(self) -> int:
        return self.gpus // self.tensor

    @property
    def parts(self) -> int:
        """Parts of the batch that are under way."""
        wanted = self.stages * (2 if self.halves else 1)
        return min(wanted, self.serving.batch)

    @property
    def part(self) -> Serving:
        """The largest of them."""
        return replace(self.serving, batch=math.ceil(self.serving.batch / self.parts))


def serving_step(serving: Serving, cluster: Cluster, layout: str, replicas: int = 1, weight_bits: int = 16) -> Outcome:
    """A token for each of `serving.batch` users, with its share of their prompts' prefill.

    Raises PlanError for another layout, for replicas that do not divide the GPUs, and for drives where there are none.
    """
    replica = _replica(serving, cluster, layout, replicas)
    stage = {
        "matrices": _matrix_seconds(replica, cluster, weight_bits, layout),
        "attention": _attention_seconds(replica, cluster, layout),
        "tensor parallel": _tensor_seconds(replica, cluster),
        "network": _network_seconds(replica, cluster),
    }
    hidden = 0.0
    if replica.parts == 2 * replica.stages:
        hidden = min(stage["attention"], stage["matrices"])
        stage["attention" if hidden == stage["attention"] else "matrices"] = 0.0
    rounds = max(replica.parts, replica.stages)
    prefill = replica.serving.batch * first_token_seconds(serving, cluster, replica.gpus) / serving.new
    held, room = _memory(serving, cluster, layout, replicas, weight_bits)
    return Outcome(
        system=f"{layout}, {cluster.hosts} hosts, {replicas} replicas",
        model=serving.model,
        phases={name: rounds * seconds for name, seconds in stage.items()} | {"prefill": prefill},
        units=serving.batch,
        hidden={"shorter of matrices and attention": rounds * hidden},
        memory_bytes=held,
        capacity_bytes=room,
        parts=cluster.parts("csd" if layout == "drives" else ""),
        dram_bytes=cluster.added_memory_bytes,
        assumptions=_ASSUMPTIONS,
    )


def first_token_seconds(serving: Serving, cluster: Cluster, gpus: int) -> float:
    """Seconds of one prompt on so many GPUs: every weight for every token, and attention among them."""
    shape, gpu = serving.shape, read_part(Gpu, cluster.gpu)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * float(serving.prompt) ** 2
    flops = 2 * shape.active * float(serving.prompt) + attention
    return gpu.seconds(flops / gpus, 2 * shape.active / gpus, read_part(Runtime, "tensor-parallel").prefill_fraction)


def replica_counts(cluster: Cluster, layout: str) -> list[int]:
    """Numbers of replicas that divide the GPUs: into whole hosts or parts of one where a host is tensor parallel."""
    gpus = cluster.all_gpus
    counts = [count for count in range(1, gpus + 1) if gpus % count == 0]
    return [count for count in counts if gpus // count % _tensor(gpus // count, cluster, layout) == 0]


def _tensor(gpus: int, cluster: Cluster, layout: str) -> int:
    """GPUs of a replica of so many that share each layer."""
    return min(gpus, cluster.gpus) if layout == "GPU memory" else 1


def _replica(serving: Serving, cluster: Cluster, layout: str, replicas: int) -> _Replica:
    if layout not in LAYOUTS:
        raise PlanError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if layout == "drives" and not cluster.drives:
        raise PlanError("drives must be 1 at least where K and V are on them, not 0")
    if replicas < 1 or cluster.all_gpus % replicas:
        raise PlanError(f"replicas must divide the {cluster.all_gpus} GPUs, not {replicas}")
    gpus = cluster.all_gpus // replicas
    if replicas not in replica_counts(cluster, layout):
        raise PlanError(f"replicas must be of whole hosts or parts of one, not of {gpus} GPUs")
    tensor = _tensor(gpus, cluster, layout)
    mine = replace(serving, batch=math.ceil(serving.batch / replicas))
    return _Replica(mine, gpus, tensor, cluster.hosts / replicas, layout == "drives")


def _matrix_seconds(replica: _Replica, cluster: Cluster, weight_bits: int, layout: str) -> float:
    """Matrices of one part of the batch on one stage, and attention where K and V are in GPU memory."""
    shape, gpu, users = replica.serving.shape, read_part(Gpu, cluster.gpu), replica.part.batch
    read = weight_bits / 8 * min(shape.parameters, shape.active * users)
    kv = replica.part.kv_bytes if layout == "GPU memory" else 0.0
    flops = 2 * shape.active * users
    reached = read_part(Runtime, "tensor-parallel").decode_fraction
    return gpu.seconds(flops / replica.gpus, (read + kv) / replica.gpus, reached)


def _attention_seconds(replica: _Replica, cluster: Cluster, layout: str) -> float:
    """Attention of one part of the batch for the layers of one stage; all stages of a host are busy at once."""
    if layout == "GPU memory":
        return 0.0
    on_link = 2 * 2 * replica.serving.shape.heads * replica.serving.shape.head_dim * replica.serving.shape.layers
    link = read_part(Link, "pcie4-x16").seconds(on_link * replica.part.batch) / replica.stages
    share = cluster.gpus / replica.stages
    if layout == "host memory":
        return link + read_part(Cpu, "xeon-6342").seconds(replica.part.kv_bytes) * share
    one = sparf_page_step(replica.part, 1, overlapped=False).phases["engine and flash"]
    return link + one * share / cluster.drives


def _tensor_seconds(replica: _Replica, cluster: Cluster) -> float:
    """Two all-reduces a layer among the GPUs of a host, for one part of the batch and the layers of one stage."""
    if replica.tensor == 1:
        return 0.0
    shape, network = replica.serving.shape, read_part(Network, cluster.network)
    moved = 2 * (replica.tensor - 1) / replica.tensor * 2 * shape.hidden * replica.part.batch
    one = read_part(Link, "pcie4-x16").seconds(moved) + network.collective_us * 1e-6
    return 2 * shape.layers / replica.stages * one


def _network_seconds(replica: _Replica, cluster: Cluster) -> float:
    """Hidden states from host to host, a stage's share of the hops of one part of the batch."""
    if replica.hosts <= 1:
        return 0.0
    moved = 2 * replica.serving.shape.hidden * replica.part.batch
    return replica.hosts / replica.stages * read_part(Network, cluster.network).seconds(moved)


def _memory(
    serving: Serving, cluster: Cluster, layout: str, replicas: int, weight_bits: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a GPU, a host and a drive hold and have; K and V as long as they become."""
    shape, kv = serving.shape, 2 * serving.shape.kv * serving.batch * (serving.prompt + serving.new)
    held = {"GPU": weight_bits / 8 * shape.parameters * replicas / cluster.all_gpus}
    room = {"GPU": read_part(Gpu, cluster.gpu).memory_bytes}
    if layout == "GPU memory":
        held["GPU"] += kv / cluster.all_gpus
    elif layout == "host memory":
        held, room = held | {"host": kv / cluster.hosts}, room | {"host": cluster.memory_bytes}
    else:
        kept = read_part(KvShare, "sparf-page").copies_count * kv / (cluster.hosts * cluster.drives)
        held, room = held | {"drive": kept}, room | {"drive": read_part(SmartSsd, "smartssd").flash_bytes / 2}
    return held, room
