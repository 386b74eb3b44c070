"""Training with optimizer state on drives: ZeRO-Infinity, Smart-Infinity's three steps, and nearflash's store.

Bytes a parameter and step, fp32 states: the update reads master, states and gradient and writes master and states;
backward writes the gradient; near-storage updates send the master up. A drive reads or writes, it does not do both at
once (Smart-Infinity runs at 54 % of what overlap would give); nearflash overlaps them.

| method | over the shared link | inside the drives |
|---|---|---|
| ZeRO-Infinity | gradient down, all states up and down | |
| SU | gradient down, master up after the update | states up to the FPGA and down |
| SU+O | the same, master up while m and v are written | |
| SU+O+C | kept gradients and indices (8 bytes each) down | gradient expanded beside the flash |

What nothing overlaps: the first parameters of forward, the last gradients of backward, the kernel of the last subgroup.

Source: Smart-Infinity (HPCA'24).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link, raid0_rate
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Cpu, Gpu, Runtime
from nearflash.explore.shapes import find_trained
from nearflash.explore.tables import read_part

__all__ = ["METHODS", "OptimizerBytes", "SmartSsd", "Training", "speed_up", "training_step"]

METHODS = ("ZeRO-Infinity", "SU", "SU+O", "SU+O+C", "nearflash", "software-only")
_DRIVES = {"ZeRO-Infinity": "ssd-4tb", "software-only": "ssd-4tb"}
"""What is bought where the drives do not compute."""
_MASTER = _GRADIENT = 4
_PAIR = 8
_FLOPS = 2
"""A multiplication and an addition for each parameter and token, in each of the passes."""
_BACKWARD_PASSES = 3


@dataclass(frozen=True)
class SmartSsd:
    """A drive with an FPGA: peer-to-peer rates, bytes that the updater reads a second, its memory, its flash."""

    source: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    updater_bytes_per_s: float
    dram_bytes_per_s: float
    flash_bytes: float
    subgroup_params_count: float


@dataclass(frozen=True)
class Buckets:
    """Parameters that are read before a pass can begin, and whose gradients are written after backward has ended."""

    source: str
    prefetch_params_count: float
    reduce_params_count: float


@dataclass(frozen=True)
class OptimizerBytes:
    """State beside the master, and what a CPU moves in memory for the step."""

    FILE: ClassVar[str] = "optimizer"
    """Its data file."""
    source: str
    state_bytes_per_param: float
    cpu_bytes_per_param: float


@dataclass(frozen=True)
class Training:
    """A training step. congested: the GPU sits behind the drives' link too. keep: of gradients, for C.

    parameters: where the fp16 copy lies between steps, in host memory, or on the drives, whose link both passes read it
    over then. Raises PlanError for another method or place, counts below 1, or a share outside (0, 1].
    """

    model: str = "gpt2-8.4b"
    method: str = "ZeRO-Infinity"
    drives: int = 6
    gpu: str = "a5000"
    optimizer: str = "adam"
    keep: float = 0.01
    batch: int = 4
    sequence: int = 1024
    congested: bool = False
    parameters: str = "host"

    def __post_init__(self) -> None:
        if self.parameters not in ("host", "drives"):
            raise PlanError(f"parameters must be host or drives, not {self.parameters!r}")
        if self.method not in METHODS:
            raise PlanError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        if min(self.drives, self.batch, self.sequence) < 1:
            raise PlanError(
                f"drives, batch and sequence must be 1 at least, not {self.drives}, {self.batch}, {self.sequence}"
            )
        if not 0 < self.keep <= 1:
            raise PlanError(f"keep must be above 0 and 1 at most, not {self.keep}")


@dataclass(frozen=True)
class _Machine:
    drive: SmartSsd
    shared: Link
    cpu: Cpu
    gpu: Gpu
    runtime: Runtime
    host: Link
    buckets: Buckets


def _machine(gpu: str) -> _Machine:
    return _Machine(
        read_part(SmartSsd, "smartssd"),
        read_part(Link, "pcie-expansion"),
        read_part(Cpu, "xeon-6342"),
        read_part(Gpu, gpu),
        read_part(Runtime, "zero-infinity"),
        read_part(Link, "pcie4-x16"),
        read_part(Buckets, "deepspeed"),
    )


def training_step(training: Training) -> Outcome:
    """One step of a model whose state lies on the drives."""
    parts, state = _machine(training.gpu), read_part(OptimizerBytes, training.optimizer)
    parameters = find_trained(training.model).parameters_count
    phases, hidden = _passes(training, parts, parameters)
    read = _MASTER + _GRADIENT + state.state_bytes_per_param
    written = _MASTER + state.state_bytes_per_param + (2 if training.parameters == "drives" else 0)
    update, update_hidden = _UPDATES[training.method](training, parts, parameters, read, written, state)
    held = (written + _GRADIENT) * parameters
    link = _link_bytes(training, parameters, read, written)
    return Outcome(
        system=f"{training.method}, {training.drives} drives",
        model=training.model,
        phases=phases | update,
        hidden=hidden | update_hidden,
        memory_bytes={"drives": held},
        capacity_bytes={"drives": training.drives * parts.drive.flash_bytes},
        parts={training.gpu: 1, "host": 1, _DRIVES.get(training.method, "smartssd"): training.drives},
        traffic_bytes={"shared link": link, "drives": (read + written) * parameters},
        assumptions=("activations are recomputed in backward", "fp16 weights stream to the GPU beside its computing",
                     "gradients leave while backward computes", "a drive reads or writes, but for nearflash's overlap"),
    )  # fmt: skip


def _gradient_bytes(training: Training) -> float:
    """Bytes of gradient a parameter that backward sends to the drives."""
    if training.method == "SU+O+C":
        return min(_GRADIENT, _PAIR * training.keep)
    return {"nearflash": 2.0, "software-only": 0.0}.get(training.method, _GRADIENT)


def _passes(training: Training, parts: _Machine, parameters: float) -> tuple[dict[str, float], dict[str, float]]:
    tokens = training.batch * training.sequence
    forward_s = parts.gpu.seconds(_FLOPS * parameters * tokens, 2 * parameters, parts.runtime.prefill_fraction)
    stream = parts.host.seconds(2 * parameters)
    shared = 2 * parameters / parts.shared.bytes_per_s if training.congested else 0.0
    rate = raid0_rate(parts.drive.write_bytes_per_s, training.drives, parts.shared)
    offload = _gradient_bytes(training) * parameters / rate
    last = offload * min(1.0, parts.buckets.reduce_params_count / parameters)
    load, drive_load = _load_seconds(training, parts, parameters)
    first = min(1.0, parts.buckets.prefetch_params_count / parameters) * (stream + load)
    computing = _BACKWARD_PASSES * forward_s
    before_last = offload - last
    writing = before_last * rate / (training.drives * parts.drive.write_bytes_per_s)
    backward = max(computing, stream, 2 * shared + before_last, shared + load, drive_load + writing)
    return (
        {
            "first parameters": first,
            "forward": max(forward_s, stream, shared + load),
            "backward": computing,
            "gradient offload": backward - computing + last,
        },
        {"weights to GPU": 2 * stream, "gradient offload": min(before_last, computing)},
    )


def _load_seconds(training: Training, parts: _Machine, parameters: float) -> tuple[float, float]:
    """Seconds of fp16 parameters from the drives in one pass: over the link they share, and of the drives alone."""
    if training.parameters == "host":
        return 0.0, 0.0
    alone = training.drives * parts.drive.read_bytes_per_s
    rate = raid0_rate(parts.drive.read_bytes_per_s, training.drives, parts.shared)
    return 2 * parameters / rate, 2 * parameters / alone


def _up_seconds(training: Training, parts: _Machine, moved: float) -> float:
    """Seconds of updated parameters on their way to host memory, where that is their place."""
    rate = raid0_rate(parts.drive.read_bytes_per_s, training.drives, parts.shared)
    return moved / rate if training.parameters == "host" else 0.0


def _link_bytes(training: Training, parameters: float, read: float, written: float) -> float:
    sent = _gradient_bytes(training) + (4 if training.parameters == "drives" else 0)
    if training.method in ("ZeRO-Infinity", "software-only"):
        return (sent + read + written - (0 if _gradient_bytes(training) else _GRADIENT)) * parameters
    up = 2 if training.method == "nearflash" else _MASTER
    return (sent + (up if training.parameters == "host" else 0)) * parameters


def _host_update(training: Training, parts: _Machine, parameters: float, read: float, written: float,
                 state: OptimizerBytes) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    up = raid0_rate(parts.drive.read_bytes_per_s, training.drives, parts.shared)
    down = raid0_rate(parts.drive.write_bytes_per_s, training.drives, parts.shared)
    return {
        "state read": read * parameters / up,
        "update": parts.cpu.seconds(state.cpu_bytes_per_param * parameters),
        "state write": written * parameters / down,
    }, {}


def _software_update(training: Training, parts: _Machine, parameters: float, read: float, written: float,
                     state: OptimizerBytes) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """Gradients stay in host memory, reads, writes and the update overlap."""
    phases, _ = _host_update(training, parts, parameters, read - _GRADIENT, written, state)
    longest = max(phases, key=phases.__getitem__)
    return {longest: phases.pop(longest)}, phases


def _near_update(training: Training, parts: _Machine, parameters: float, read: float, written: float,
                 state: OptimizerBytes) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """Update the parameters of one drive; the updater takes bytes as they are read."""
    mine, drive = parameters / training.drives, parts.drive
    taken = read - _GRADIENT + _gradient_bytes(training)
    reading = taken * mine / drive.read_bytes_per_s
    kernel = read * mine / drive.updater_bytes_per_s
    writing = written * mine / drive.write_bytes_per_s
    up = _up_seconds(training, parts, _MASTER * parameters)
    # The kernel works on one subgroup while the next is read; of the last one nothing else is left to do.
    last = min(1.0, drive.subgroup_params_count / mine)
    behind = kernel * last + max(0.0, (kernel - reading) * (1 - last))
    phases = {"state read": reading, "update": behind, "state write": writing}
    hidden = {"update": kernel - behind}
    if training.method == "SU":
        return phases | {"parameters up": up}, hidden
    late = max(0.0, up - writing)
    return phases | {"parameters up": late}, hidden | {"parameters up": up - late}


def _overlap_update(training: Training, parts: _Machine, parameters: float, read: float, written: float,
                       state: OptimizerBytes) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """nearflash's store: reads, kernel, writes and fp16 parameters up overlap, gradients wait in the drive's memory."""
    mine, drive = parameters / training.drives, parts.drive
    parts_s = {
        "state read": (read - _GRADIENT) * mine / drive.read_bytes_per_s,
        "update": (read + written) * mine / drive.dram_bytes_per_s,
        "state write": written * mine / drive.write_bytes_per_s,
        "parameters up": _up_seconds(training, parts, 2 * parameters),
    }
    longest = max(parts_s, key=parts_s.__getitem__)
    return {longest: parts_s.pop(longest)}, parts_s


_UPDATES = {
    "ZeRO-Infinity": _host_update,
    "software-only": _software_update,
    "SU": _near_update,
    "SU+O": _near_update,
    "SU+O+C": _near_update,
    "nearflash": _overlap_update,
}


def speed_up(training: Training) -> float:
    """Over ZeRO-Infinity on as many drives."""
    return training_step(replace(training, method="ZeRO-Infinity")).seconds / training_step(training).seconds
