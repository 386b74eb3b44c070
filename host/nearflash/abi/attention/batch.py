"""A batch of heads: what one start of the attend kernel computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.attention.descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES, AttendDescriptor, HeadCompletion
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.kernel.commands import AttendCommand
from nearflash.abi.kernel.config import AttendConfig, KernelConfig

__all__ = ["AttendBatch"]

_FP16_BYTES, _FP32_BYTES = 2, 4


@dataclass(frozen=True)
class AttendBatch:
    """Heads in device memory: descriptors, as `pack` gives them, at one address, completions at another.

    A head's own faults come back in its completion, not as errors: other heads are not touched by them.
    """

    kernel: ClassVar[str] = "attend"

    descriptors: tuple[AttendDescriptor, ...]
    descriptors_address: int
    """A multiple of 128."""
    completions_address: int
    """A multiple of 32."""
    contexts: int
    """Heads in flight: a power of two up to the build's contexts."""
    watchdog_cycles: int = 0
    """Cycles without progress until the heads in flight fail; 0: never."""

    def pack(self) -> bytes:
        """Encode what lies at `descriptors_address`. Raises CommandError for a field that does not fit its place."""
        return b"".join(descriptor.pack() for descriptor in self.descriptors)

    def completions(self, records: bytes) -> tuple[HeadCompletion, ...]:
        """How the heads ended: what lies at `completions_address` when the kernel has ended, unpacked."""
        starts = range(0, COMPLETION_BYTES * len(self.descriptors), COMPLETION_BYTES)
        return tuple(HeadCompletion.unpack(records[start : start + COMPLETION_BYTES]) for start in starts)

    def reads(self) -> dict[str, tuple[int, int]]:
        """Ranges read, pages excepted: (address, bytes)."""
        ranges = {"descriptors": (self.descriptors_address, DESCRIPTOR_BYTES * len(self.descriptors))}
        for index, descriptor in enumerate(self.descriptors):
            ranges[f"head {index} q"] = (descriptor.q_address, descriptor.group * descriptor.dim * _FP16_BYTES)
            ranges[f"head {index} v_mean"] = (descriptor.v_mean_address, descriptor.dim * _FP32_BYTES)
        return ranges

    def writes(self) -> dict[str, tuple[int, int]]:
        """Ranges written: (address, bytes)."""
        ranges = {"completions": (self.completions_address, COMPLETION_BYTES * len(self.descriptors))}
        for index, descriptor in enumerate(self.descriptors):
            ranges[f"head {index} out"] = (descriptor.out_address, descriptor.group * descriptor.dim * _FP16_BYTES)
        return ranges

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError or AlignmentError where the kernel would reject the whole batch."""
        if not isinstance(config, AttendConfig):
            raise CommandError(f"a batch of heads must go to an attend kernel, not to {config.full_name}")
        if not self.descriptors:
            raise CommandError("a batch must hold at least 1 head, not 0")
        if not (0 < self.contexts <= config.contexts and self.contexts & (self.contexts - 1) == 0):
            raise CommandError(f"contexts must be a power of two up to {config.contexts}, not {self.contexts!r}")
        if not 0 <= self.watchdog_cycles < 1 << 32:
            raise CommandError(f"watchdog_cycles must fit 32 bits, not {self.watchdog_cycles!r}")
        for name, unit in _UNITS.items():
            if getattr(self, name) % unit:
                raise AlignmentError(f"{name} must be a multiple of {unit} bytes, not {getattr(self, name):#x}")

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""
        return {
            "command": AttendCommand.HEADS,
            "count": len(self.descriptors),
            "descriptors_address": self.descriptors_address,
            "completions_address": self.completions_address,
            "contexts": self.contexts,
            "watchdog": self.watchdog_cycles,
        }


_UNITS: Mapping[str, int] = {"descriptors_address": DESCRIPTOR_BYTES, "completions_address": COMPLETION_BYTES}
