"""Rooflines of what computes: a GPU, an NPU, a CPU that updates parameters, and what software reaches of them."""

from dataclasses import dataclass

__all__ = ["Cpu", "Gpu", "Host", "Npu", "Runtime"]


@dataclass(frozen=True)
class Gpu:
    """Datasheet rates of a GPU."""

    source: str
    memory_bytes: float
    memory_bytes_per_s: float
    fp16_flops_per_s: float

    def seconds(self, flops: float, moved_bytes: float, reached: float = 1.0) -> float:
        """Seconds of work under both roofs: flops at the share reached of the peak, bytes at the memory's rate."""
        return max(flops / (self.fp16_flops_per_s * reached), moved_bytes / self.memory_bytes_per_s)


@dataclass(frozen=True)
class Npu:
    """An NPU: matrices, and elementwise work at a fraction of that rate. buffer: for K and V of unfinished pages."""

    source: str
    bf16_ops_per_s: float
    vector_fraction: float
    buffer_bytes: float

    def matrix_seconds(self, macs: float) -> float:
        """Seconds of so many multiplications and additions."""
        return 2 * macs / self.bf16_ops_per_s

    def vector_seconds(self, operations: float) -> float:
        """Seconds of elementwise operations, as in a softmax."""
        return operations / (self.bf16_ops_per_s * self.vector_fraction)


@dataclass(frozen=True)
class Host:
    """Host memory, and swap beyond it: so many bytes a page fault, faults one after another."""

    source: str
    memory_bytes: float
    swap_bytes: float
    fault_us: float

    def swap_seconds(self, used_bytes: float) -> float:
        """Seconds of page faults in a pass over so many bytes: none if memory holds them, else of all (LRU)."""
        return used_bytes / self.swap_bytes * self.fault_us * 1e-6 if used_bytes > self.memory_bytes else 0.0


@dataclass(frozen=True)
class Cpu:
    """A CPU whose memory bounds the optimizer step."""

    source: str
    memory_bytes_per_s: float
    reached_fraction: float

    def seconds(self, moved_bytes: float) -> float:
        """Seconds of work that memory bounds."""
        return moved_bytes / (self.memory_bytes_per_s * self.reached_fraction)


@dataclass(frozen=True)
class Runtime:
    """Software: shares of a GPU's peak in prefill (or training) and decode, of its memory's rate in attention.

    read: bytes of KV or weights a second that it gets from one drive, or from host memory. layer: seconds of its own
    for each layer.
    """

    source: str
    prefill_fraction: float
    decode_fraction: float
    attention_fraction: float
    read_bytes_per_s: float
    layer_s: float
