"""A decoder trained by a cluster: parameters, gradients and optimizer state divided among all GPUs (FSDP2, ZeRO-3).

| layout | optimizer state | who updates |
|---|---|---|
| GPU memory | in GPU memory | GPUs |
| host memory | in host memory | the CPU (ZeRO-Offload) |
| plain drives | on drives behind a shared link | the CPU (ZeRO-Infinity, all overlapped) |
| drives | on drives that compute | the drives (nearflash: a store a rank) |

Each host updates its own part. Parameters are gathered for forward and again for backward, gradients are reduced and
scattered, beside computing; what of it takes longer than computing is seen.
"""

from dataclasses import dataclass

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Cpu, Gpu, Runtime
from nearflash.explore.shapes import Decoder, decoder
from nearflash.explore.systems.cluster import Cluster, Network
from nearflash.explore.systems.fleet import update_rates
from nearflash.explore.systems.smart_infinity import OptimizerBytes, SmartSsd
from nearflash.explore.tables import read_part

__all__ = ["TRAINING_LAYOUTS", "ClusterTraining", "cluster_training_step"]

TRAINING_LAYOUTS = ("GPU memory", "host memory", "plain drives", "drives")
_DRIVES = {"plain drives": "ssd-4tb", "drives": "smartssd"}
_BF16 = 2
_MASTER = 4
_PASSES = 4
"""Forward, forward again in backward, and backward, which takes twice as long."""
_FLOPS = 2
_GATHERED = 3
"""Parameters twice and gradients once."""


@dataclass(frozen=True)
class ClusterTraining:
    """A training step: tokens of a GPU in a step. Raises PlanError for another layout or tokens below 1."""

    model: str = "llama3.1-70b"
    layout: str = "drives"
    optimizer: str = "adam"
    tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.layout not in TRAINING_LAYOUTS:
            raise PlanError(f"layout must be one of {', '.join(TRAINING_LAYOUTS)}, not {self.layout!r}")
        if self.tokens < 1:
            raise PlanError(f"tokens must be 1 at least, not {self.tokens}")


def cluster_training_step(training: ClusterTraining, cluster: Cluster) -> Outcome:
    """One step; units are its tokens. Raises PlanError for a layout on drives without drives."""
    if training.layout in _DRIVES and not cluster.drives:
        raise PlanError(f"drives must be 1 at least for layout {training.layout}, not 0")
    shape, gpu = decoder(training.model), read_part(Gpu, cluster.gpu)
    reached = read_part(Runtime, "zero-infinity").prefill_fraction
    computing = _PASSES * gpu.seconds(_FLOPS * shape.active * training.tokens, 0, reached)
    gathering = _gather_seconds(shape, cluster)
    held, room = _memory(training, shape, cluster)
    return Outcome(
        system=f"{training.layout}, {cluster.hosts} hosts",
        model=training.model,
        phases={
            "forward and backward": computing,
            "gathering": max(0.0, gathering - computing),
            "update": _update_seconds(training, shape, cluster),
        },
        hidden={"gathering": min(gathering, computing)},
        units=cluster.all_gpus * training.tokens,
        memory_bytes=held,
        capacity_bytes=room,
        parts=cluster.parts(_DRIVES.get(training.layout, "")),
        dram_bytes=cluster.added_memory_bytes,
        assumptions=("activations are recomputed in backward", "gathering overlaps computing, the update does not",
                     "a checkpoint of each layer's input stays on the GPU"),
    )  # fmt: skip


def _gather_seconds(shape: Decoder, cluster: Cluster) -> float:
    """Bytes that a GPU takes over its link, and that a host takes over the network, at once."""
    all_bytes = _GATHERED * _BF16 * shape.parameters
    local = read_part(Link, "pcie4-x16").seconds(all_bytes * (1 - 1 / cluster.all_gpus))
    if cluster.hosts == 1:
        return local
    messages = _GATHERED * shape.layers
    away = read_part(Network, cluster.network).seconds(all_bytes * (1 - 1 / cluster.hosts), messages)
    return max(local, away)


def _update_seconds(training: ClusterTraining, shape: Decoder, cluster: Cluster) -> float:
    """Seconds of one host's part; gradients come down and parameters go up over the GPUs' links around it."""
    state, mine = read_part(OptimizerBytes, training.optimizer), shape.parameters / cluster.hosts
    if training.layout == "GPU memory":
        return read_part(Gpu, cluster.gpu).seconds(0, state.cpu_bytes_per_param * mine / cluster.gpus)
    link = read_part(Link, "pcie4-x16").seconds(2 * _BF16 * mine / cluster.gpus)
    if training.layout == "host memory":
        return link + read_part(Cpu, "xeon-6342").seconds(state.cpu_bytes_per_param * mine)
    near, plain = (cluster.drives, 0) if training.layout == "drives" else (0, cluster.drives)
    return link + mine / sum(update_rates(near, plain, training.optimizer).values())


def _memory(training: ClusterTraining, shape: Decoder, cluster: Cluster) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a GPU, a host and a drive hold and have: of parameters and gradients a part, of two layers all."""
    state = _MASTER + read_part(OptimizerBytes, training.optimizer).state_bytes_per_param
    mine = shape.parameters / cluster.all_gpus
    layers = 2 * _BF16 * shape.layer_parameters
    kept = _BF16 * training.tokens * shape.hidden * shape.layers
    held = {"GPU": 2 * _BF16 * mine + layers + kept}
    room = {"GPU": read_part(Gpu, cluster.gpu).memory_bytes}
    if training.layout == "GPU memory":
        held["GPU"] += state * mine
    elif training.layout == "host memory":
        held, room = held | {"host": (state + _BF16) * mine * cluster.gpus}, room | {"host": cluster.memory_bytes}
    else:
        held |= {"drive": state * mine * cluster.gpus / cluster.drives}
        room |= {"drive": read_part(SmartSsd, "smartssd").flash_bytes}
    return held, room
