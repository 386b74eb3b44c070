"""Decode attention on a device: operands in, outputs back, heads with a wrong reference once more.

Pages lie where their tables point, in the device's memory or on its flash; all else goes down and comes back here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.descriptor import (
    COMPLETION_BYTES,
    DESCRIPTOR_BYTES,
    AttendDescriptor,
    HeadCompletion,
    Mode,
)
from nearflash.abi.attention.faults import FAULT_ADVICE, REFERENCE_FAULTS, Fault
from nearflash.abi.errors import CommandError, DeviceError, ShapeError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Buffer, Device

__all__ = ["AttendResult", "Head", "HeadOutput", "PlacedBatch", "attend", "most_contexts"]

_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class Head:
    """One head to be computed. Raises ShapeError where q, v_mean and the descriptor do not fit together."""

    descriptor: AttendDescriptor
    """Its addresses are filled in when the head is placed."""
    q: NDArray[np.float16]
    """(group, dim)."""
    v_mean: NDArray[np.float32]
    """(dim,), the mean of all values so far."""
    token_table: NDArray[np.uint64]
    """Page entries (abi.attend.pages.PageEntry) of the KV page groups."""
    index_table: NDArray[np.uint64]
    """Page entries of the index pages; empty where there are none."""

    def __post_init__(self) -> None:
        descriptor = self.descriptor
        for name, shape in (("q", (descriptor.group, descriptor.dim)), ("v_mean", (descriptor.dim,))):
            if getattr(self, name).shape != shape:
                raise ShapeError(f"{name} must have the shape {shape}, not {getattr(self, name).shape}")


@dataclass(frozen=True)
class HeadOutput:
    """Outcome of one head."""

    completion: HeadCompletion
    out: NDArray[np.float16] | None
    """(group, dim); None after a fault."""

    def value(self) -> NDArray[np.float16]:
        """The output. Raises DeviceError that names the head's faults and what to do."""
        if self.out is None:
            faults = [fault for fault in Fault if fault & self.completion.faults]
            names = ", ".join(str(fault.name) for fault in faults)
            raise DeviceError(f"head must end without fault, not {names}: {FAULT_ADVICE[faults[0]]}")
        return self.out


@dataclass(frozen=True)
class AttendResult:
    """Outputs in the order of the heads, and the counters of each start of the kernel."""

    heads: tuple[HeadOutput, ...]
    batches: tuple[Completion, ...]


def attend(
    device: Device,
    heads: Sequence[Head],
    *,
    contexts: int | None = None,
    watchdog_cycles: int = 0,
    repeats: int = 2,
    timeout_s: float = 600.0,
) -> AttendResult:
    """Compute all heads; those of which only the reference was wrong again with the right one, at most `repeats` times.

    `contexts` is the number of heads in flight (default: the build's). A fault of a head is in its output and touches
    no other one.

    Raises CommandError for a device that is no attend kernel, and for a head whose entries would reach into another's
    (most_contexts never asks for that); DeviceError, WaitTimeoutError as Device.wait does.
    """
    config = device.identity.config
    if not isinstance(config, AttendConfig):
        raise CommandError(f"heads must go to an attend kernel, not to {device.identity.name}")
    contexts = contexts or config.contexts
    if any(head.descriptor.overfills(config, contexts) for head in heads):
        raise CommandError(f"contexts must be fewer, as most_contexts says, for the entries of a head, not {contexts}")
    ended: dict[int, HeadOutput] = {}
    batches: list[Completion] = []
    waiting = dict(enumerate(heads))
    while waiting:
        placed = PlacedBatch(device, list(waiting.values()), contexts, watchdog_cycles)
        try:
            batches.append(device.run(placed.batch, timeout_s))
            results = dict(zip(waiting, placed.results(), strict=True))
        finally:
            device.free(placed.buffer)
        ended |= results
        again = len(batches) <= repeats
        waiting = {
            index: replace(waiting[index], descriptor=_add_references(waiting[index].descriptor, result.completion))
            for index, result in results.items()
            if again and result.completion.faults and not result.completion.faults & ~REFERENCE_FAULTS
        }
    return AttendResult(tuple(ended[index] for index in range(len(heads))), tuple(batches))


def most_contexts(config: AttendConfig, heads: Sequence[Head]) -> int:
    """The most contexts that leave room for every head. Raises CommandError where one needs more than the build has."""
    for contexts in (config.contexts >> step for step in range(config.contexts.bit_length())):
        if all(head.descriptor.fits(config, contexts) for head in heads):
            return contexts
    tokens = max(head.descriptor.tokens for head in heads)
    raise CommandError(f"tokens must be fewer for the room of {config.full_name}, not {tokens}")


def _add_references(descriptor: AttendDescriptor, completion: HeadCompletion) -> AttendDescriptor:
    """The descriptor with the maxima found as references."""
    return replace(descriptor, mode=descriptor.mode | Mode.REFERENCE, reference=completion.maximum[: descriptor.group])


class PlacedBatch:
    """A batch in a buffer of its own: descriptors, completions, then operands, outputs and tables."""

    def __init__(self, device: Device, heads: Sequence[Head], contexts: int, watchdog_cycles: int) -> None:
        self._heads = heads
        size = len(heads) * (DESCRIPTOR_BYTES + COMPLETION_BYTES)
        size += sum(
            -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            for head in heads
            for array in (head.q, head.q, head.v_mean, head.token_table, head.index_table)
        )
        self.buffer: Buffer = device.allocate(size)
        self._end = len(heads) * (DESCRIPTOR_BYTES + COMPLETION_BYTES)
        self._completions = len(heads) * DESCRIPTOR_BYTES
        descriptors = tuple(self._place(head) for head in heads)
        address = self.buffer.address
        self.batch = AttendBatch(descriptors, address, address + self._completions, contexts, watchdog_cycles)
        packed = np.frombuffer(self.batch.pack(), np.uint8)
        self.buffer.host[: len(packed)] = packed
        self.buffer.sync_to_device()

    def _place(self, head: Head) -> AttendDescriptor:
        return replace(
            head.descriptor,
            q_address=self._put(head.q),
            v_mean_address=self._put(head.v_mean),
            out_address=self._put(np.zeros_like(head.q)),
            index_table_address=self._put(head.index_table),
            token_table_address=self._put(head.token_table),
        )

    def _put(self, array: NDArray[np.generic]) -> int:
        """Put an array's bytes after what is there; its device address."""
        start = self._end
        self.buffer.host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._end = start + -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self.buffer.address + start

    def results(self) -> list[HeadOutput]:
        """Completions and outputs, brought back."""
        buffer, count = self.buffer, len(self._heads)
        buffer.sync_from_device(self._completions, count * COMPLETION_BYTES)
        completions = self.batch.completions(bytes(buffer.host[self._completions :][: count * COMPLETION_BYTES]))
        return [
            HeadOutput(completion, None if completion.faults else self._out(head.q, placed.out_address))
            for completion, head, placed in zip(completions, self._heads, self.batch.descriptors, strict=True)
        ]

    def _out(self, q: NDArray[np.float16], address: int) -> NDArray[np.float16]:
        start = address - self.buffer.address
        self.buffer.sync_from_device(start, q.nbytes)
        return self.buffer.host[start : start + q.nbytes].view(np.float16).reshape(q.shape).copy()
