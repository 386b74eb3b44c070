"""A cluster: hosts alike, with GPUs, drives and memory, joined by a network."""

from collections.abc import Mapping
from dataclasses import dataclass

from nearflash.abi.errors import PlanError
from nearflash.explore.processors import Gpu
from nearflash.explore.tables import read_part

__all__ = ["Cluster", "Network"]

_HOSTS_OWN_BYTES = 64e9
"""Memory that the price of a host includes."""


@dataclass(frozen=True)
class Network:
    """The network between hosts. message: between hosts, collective: among the GPUs of one, before any byte."""

    source: str
    raw_bytes_per_s: float
    reached_fraction: float
    message_us: float
    collective_us: float

    def seconds(self, moved_bytes: float, messages: float = 1.0) -> float:
        """Seconds of a host's bytes, in so many messages, one direction."""
        return moved_bytes / (self.raw_bytes_per_s * self.reached_fraction) + messages * self.message_us * 1e-6


@dataclass(frozen=True)
class Cluster:
    """Hosts, each with GPUs, drives that compute (or plain ones) and bytes of DRAM.

    Raises PlanError for counts below 1 (drives: below 0) and for a GPU or a network that is not in the tables.
    """

    hosts: int = 1
    gpus: int = 8
    drives: int = 4
    gpu: str = "a100"
    network: str = "ethernet-100g"
    memory_bytes: float = 512e9

    def __post_init__(self) -> None:
        if min(self.hosts, self.gpus) < 1 or self.drives < 0 or self.memory_bytes <= 0:
            raise PlanError(
                f"hosts, gpus and memory must be 1 at least and drives 0, not {self.hosts}, {self.gpus}, "
                f"{self.memory_bytes:g} and {self.drives}"
            )
        read_part(Gpu, self.gpu)
        read_part(Network, self.network)

    @property
    def all_gpus(self) -> int:
        """GPUs of all hosts."""
        return self.hosts * self.gpus

    @property
    def added_memory_bytes(self) -> float:
        """Memory of all hosts that is bought beside them."""
        return self.hosts * max(0.0, self.memory_bytes - _HOSTS_OWN_BYTES)

    def parts(self, drive: str = "") -> Mapping[str, float]:
        """Components that are bought, by names of component.toml; drive: the kind that each host has, if any."""
        bought = {self.gpu: self.all_gpus, "host": self.hosts}
        bought |= {self.network: self.hosts} if self.hosts > 1 else {}
        return bought | ({drive: self.hosts * self.drives} if drive and self.drives else {})
