"""A machine as the planner sees it: memory, links, drives, compute, in one TOML file with a unit in every key.

Rates are bytes or operations a second, sizes bytes, times seconds. Each table names its source. On a machine without a
GPU, `gpu` is the part of host memory that the model may compute in, and links to it are copies in memory.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.errors import PlanError
from nearflash.support.files import read_text
from nearflash.support.tables import TableReader, brief

__all__ = ["Compute", "DeviceTier", "Disk", "DiskRate", "Links", "Machine", "MemorySizes", "Prices", "RuntimeCosts",
           "list_machines", "load_machine", "machine_toml"]  # fmt: skip

_FORMAT, _VERSION = "nearflash machine", 1


@dataclass(frozen=True)
class MemorySizes:
    """Bytes that a plan may fill by tier; 0 where the tier is not there."""

    source: str
    gpu_bytes: float
    host_bytes: float
    disk_bytes: float = 0.0


@dataclass(frozen=True)
class Links:
    """Between host memory and GPU: pinned copies; GPU to host where cache or activations go to memory, pinned or not.

    disk_to_host_to_gpu copies through pinned buffers run at host_to_gpu's rate, after the disk's. one_memory: what
    computes is the host: dense weights are used where they lie there, or are read to.
    """

    source: str
    host_to_gpu_bytes_per_s: float
    gpu_to_host_bytes_per_s: float
    gpu_to_host_cache_bytes_per_s: float
    host_to_gpu_unpinned_bytes_per_s: float | None = None
    one_memory: bool = False


@dataclass(frozen=True)
class Disk:
    """Rates of the drives for weights and for the KV cache, whose files and requests differ.

    write_cache: prefill's writes as the writer sees them, into the page cache where I/O is buffered. write_back: what
    the drive takes in the long run. write_tokens: decode's small writes, a token of each sequence. request_s: of a
    request beside its bytes, one at a time. direct: the kind of I/O that these rates are of.
    """

    source: str
    read_weights_bytes_per_s: float
    read_cache_bytes_per_s: float
    write_cache_bytes_per_s: float
    write_back_bytes_per_s: float
    write_tokens_bytes_per_s: float
    request_s: float = 0.0
    direct: bool = False


@dataclass(frozen=True)
class Compute:
    """Rates of matrix products (GPU), and of attention on both sides.

    Attention in decode is bound by memory: bytes of KV it goes through a second, each counted once for all query heads
    that share it, of prompts without padding (with padding, transformers repeats them for each head first); on the GPU;
    on the host over a cache that lies there, and over a buffer just filled from the disk. dequantise, expand: bytes
    that come out a second of weights in 4 bits and of compressed ones; pack_cache, unpack_cache: dense bytes of K and V
    that become 4 bits, and that come out of them (None: as dequantise). All of values in the dtype that computes.
    matmul_factors: what products of matmul_tokens take, over the longer of multiplying and reading the weights; between
    them by the logarithm, beyond them as at the ends. head: bytes of the output layer's weights that a product of one
    token reads a second: a large matrix, where a layer's small ones wait for what is done between them (None: as
    gpu_memory).
    """

    source: str
    matmul_prefill_flops_per_s: float
    matmul_decode_flops_per_s: float
    attention_prefill_flops_per_s: float
    gpu_attention_bytes_per_s: float
    gpu_memory_bytes_per_s: float
    host_attention_bytes_per_s: float
    host_buffer_attention_bytes_per_s: float
    dequantise_bytes_per_s: float
    expand_bytes_per_s: float | None = None
    pack_cache_bytes_per_s: float | None = None
    unpack_cache_bytes_per_s: float | None = None
    head_bytes_per_s: float | None = None
    matmul_tokens: tuple[float, ...] = ()
    matmul_factors: tuple[float, ...] = ()

    def matmul_factor(self, tokens: float) -> float:
        """The factor of products of so many tokens."""
        if not self.matmul_factors:
            return 1.0
        return float(np.interp(math.log(tokens), np.log(self.matmul_tokens), self.matmul_factors))


@dataclass(frozen=True)
class RuntimeCosts:
    """Costs that the runtime on this machine cannot hide.

    exposed_weight_loads: share of loading a layer's weights in decode that no computing hides; 1 where the runtime
    waits for all streams at every step, as FlexGen's does. per_layer_s: for each layer and batch. per_pass_s: for each
    batch and pass over all layers, of the model's code around them; per_start_s: once for each batch.
    per_engine_visit_s: for each layer and sequence of a step of decode where a policy chooses what is read, as engines
    hold the KV cache then. per_routing_s: more of per_layer_s in layers with experts, whose loading waits for the
    router. per_state_s: for each element of the hidden states that pass a layer, of norms, rotation, activations and
    residuals. per_logit_s: for each logit of which a token is chosen. computing_lost_to_reads,
    computing_lost_to_copies: shares of the time of disk reads and of copies that are lost to what computes beside them:
    processors move the data, or both wait for memory (unpacking is computing); reads_lost_to_computing: the share of
    computing's time that reads lose. visits_ahead: so many visits of a layer by a batch may loads be ahead of
    computing; what takes as long as computing then waits for it now and then, and is waited for; 0: as if neither did.
    stores_scores: prefill holds all attention scores. full_prefill: it computes all sequences of a batch at once.
    offloads_embeddings: shares of the weights hold outside layers too.
    places_tensors: a share is rounded to tensors in each layer, as FlexGen does, not to layers.
    """

    source: str
    exposed_weight_loads: float = 0.0
    per_layer_s: float = 0.0
    per_pass_s: float = 0.0
    per_start_s: float = 0.0
    per_engine_visit_s: float = 0.0
    per_routing_s: float = 0.0
    per_state_s: float = 0.0
    per_logit_s: float = 0.0
    computing_lost_to_reads: float = 0.0
    computing_lost_to_copies: float = 0.0
    reads_lost_to_computing: float = 0.0
    visits_ahead: int = 0
    stores_scores: bool = False
    full_prefill: bool = False
    offloads_embeddings: bool = False
    places_tensors: bool = False


@dataclass(frozen=True)
class DeviceTier:
    """Near-storage drives that hold KV and attend over it; all of them together.

    attend: bytes of KV that they read and attend over a second. link: queries, results and new KV. read_fraction: of
    the cache that sparse attention reads.
    """

    source: str
    cache_bytes: float
    attend_bytes_per_s: float
    write_bytes_per_s: float
    link_bytes_per_s: float
    read_fraction: float = 1.0


@dataclass(frozen=True)
class Prices:
    """Dollars of an hour in which the machine computes, and of each byte written to flash, for its wear."""

    source: str
    dollars_per_hour: float
    dollars_per_written_byte: float = 0.0


@dataclass(frozen=True)
class DiskRate:
    """One measured kind of request: `call` read or write, direct or buffered, bytes a request, requests in flight."""

    call: str
    direct: bool
    request_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """All of it; `device` where there are near-storage drives, `rates` as they were measured."""

    name: str
    memory: MemorySizes
    links: Links
    disk: Disk | None
    compute: Compute
    schedule: RuntimeCosts
    device: DeviceTier | None = None
    prices: Prices | None = None
    rates: tuple[DiskRate, ...] = field(default=())

    def with_memory(self, **bytes_by_tier: float) -> "Machine":
        """The same machine with other budgets: gpu_bytes, host_bytes, disk_bytes."""
        return replace(self, memory=replace(self.memory, **bytes_by_tier))  # type: ignore[arg-type]

    @property
    def runs_on_gpu(self) -> bool:
        """Whether nearflash.offload computes, with loads ahead, in a memory that is not the host's."""
        return not self.links.one_memory and self.schedule.visits_ahead > 0


_TABLES: dict[str, Any] = {"memory": MemorySizes, "links": Links, "disk": Disk, "compute": Compute,
                           "schedule": RuntimeCosts, "device": DeviceTier, "prices": Prices}  # fmt: skip
_OPTIONAL_TABLES = ("disk", "device", "prices")
_LOST = ("computing_lost_to_reads", "computing_lost_to_copies", "reads_lost_to_computing")
_MAY_BE_ZERO = ("gpu_bytes", "disk_bytes", "request_s", "exposed_weight_loads", "per_layer_s",
                "per_pass_s", "per_start_s", "per_engine_visit_s", "per_routing_s", "per_state_s", "per_logit_s",
                "visits_ahead", "dollars_per_written_byte", *_LOST)  # fmt: skip
_LEAST, _MOST = 1e-24, 1e24
"""Of a number with a unit: beyond, what is predicted is no number any more."""
_MOST_COUNT, _MAX_BYTES = 1 << 53, 1 << 22
_FRACTIONS = ("exposed_weight_loads", "read_fraction", *_LOST)


def list_machines() -> list[str]:
    """Names of the profiles that come with nearflash."""
    folder = files("nearflash.planning") / "machines"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_machine(source: str | Path) -> Machine:
    """A profile by the name of one that comes with nearflash, or by its file.

    Raises PlanError for a name that does not exist and for a file that is not a profile to the last key.
    """
    if str(source) in list_machines():
        text = (files("nearflash.planning") / "machines" / f"{source}.toml").read_text("utf-8")
        return parse_machine(text, str(source))
    path = Path(source)
    try:
        text = read_text(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        known = ", ".join(list_machines())
        why = f"{str(source)!r}: {getattr(error, 'strerror', None) or error}"
        raise PlanError(f"machine must be one of {known}, or a readable TOML file, not {why}") from error
    return parse_machine(text, path.name)


def parse_machine(text: str, what: str = "profile") -> Machine:
    """A profile from TOML. Raises PlanError for anything but a profile."""
    try:
        body = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise PlanError(f"{what} must be TOML: {error}") from error
    begin = body.pop("format", None), body.pop("version", None)
    if begin != (_FORMAT, _VERSION) or type(begin[1]) is not int:
        raise PlanError(f'{what} must begin with format = "{_FORMAT}" and version = {_VERSION}')
    name = body.pop("name", None)
    if not isinstance(name, str) or not name:
        raise PlanError(f"{what} must have a name, not {brief(name)}")
    rates = body.pop("rates", [])
    if not isinstance(rates, list):
        raise PlanError(f"{what}: rates must be a list of tables, not {brief(rates)}")
    parsed: dict[str, Any] = {}
    for key, kind in _TABLES.items():
        if key in body:
            parsed[key] = _table(kind, body.pop(key), f"{what}: {key}")
        elif key in _OPTIONAL_TABLES:
            parsed[key] = None
        else:
            raise PlanError(f"{what} must have a table [{key}]")
    if body:
        raise PlanError(f"{what} must have only {', '.join(_TABLES)} and rates, not {', '.join(body)}")
    every = tuple(_table(DiskRate, rate, f"{what}: rates") for rate in rates)
    return Machine(name=name, **parsed, rates=every)


def _table(kind: Any, body: Any, what: str) -> Any:
    values = TableReader(PlanError, _rule).parse(kind, body, what)
    if isinstance(values, Compute):
        tokens, factors = values.matmul_tokens, values.matmul_factors
        if len(tokens) != len(factors) or any(one >= other for one, other in pairwise(tokens)):
            raise PlanError(f"{what} must have a factor in matmul_factors for each of matmul_tokens, which ascend")
    return values


def _rule(key: str, hint: Any, value: Any) -> str:
    if hint not in (int, float):
        return ""
    least = 0 if key in _MAY_BE_ZERO else _LEAST
    most = 1 if key in _FRACTIONS else _MOST_COUNT if hint is int else _MOST
    if least <= value <= most:
        return ""
    below = "0 or more" if not least else f"{least:g} or more" if value > 0 else "above 0"
    return "between 0 and 1" if key in _FRACTIONS else f"{most:g} at most" if value > most else below


def machine_toml(machine: Machine) -> str:
    """The profile as TOML that parse_machine reads back."""
    lines = [f'format = "{_FORMAT}"', f"version = {_VERSION}", f"name = {_toml(machine.name)}"]
    for key in _TABLES:
        part = getattr(machine, key)
        if part is not None:
            lines += ["", f"[{key}]", *_pairs(asdict(part))]
    for rate in machine.rates:
        lines += ["", "[[rates]]", *_pairs(asdict(rate))]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)
