"""A batch of page operations: what one start of the attend kernel does with its NAND."""

from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.attention.descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES
from nearflash.abi.attention.page_operation import (
    OPERATION_BYTES,
    OPERATION_COMPLETION_BYTES,
    OperationCompletion,
    OperationKind,
    PageOperation,
)
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.kernel.commands import AttendCommand
from nearflash.abi.kernel.config import AttendConfig, KernelConfig

__all__ = ["OPERATIONS_MAX", "PageBatch"]

OPERATIONS_MAX = (1 << 16) - 1
"""Operations of a batch."""
_UNITS = {"operations_address": DESCRIPTOR_BYTES, "completions_address": COMPLETION_BYTES}
"""Those of a batch of heads."""


@dataclass(frozen=True)
class PageBatch:
    """Operations in device memory: records, as `pack` gives them, at one address, completions at another.

    Operations of one LUN are done in their order. Reads wait until all programs and erases before them have ended, and
    the other way round. An operation's own faults come back in its completion, not as errors.
    """

    kernel: ClassVar[str] = "attend"

    operations: tuple[PageOperation, ...]
    operations_address: int
    """A multiple of 128."""
    completions_address: int
    """A multiple of 32."""

    def pack(self) -> bytes:
        """Encode what must lie at `operations_address`. Raises CommandError for a field that does not fit its place."""
        return b"".join(operation.pack() for operation in self.operations)

    def completions(self, records: bytes) -> tuple[OperationCompletion, ...]:
        """How the operations ended: what lies at `completions_address` when the kernel has ended, unpacked."""
        starts = range(0, OPERATION_COMPLETION_BYTES * len(self.operations), OPERATION_COMPLETION_BYTES)
        return tuple(
            OperationCompletion.unpack(records[start : start + OPERATION_COMPLETION_BYTES]) for start in starts
        )

    def reads(self) -> dict[str, tuple[int, int]]:
        """Ranges read: (address, bytes)."""
        records = {"operations": (self.operations_address, OPERATION_BYTES * len(self.operations))}
        return records | self._pages(OperationKind.PROGRAM)

    def writes(self) -> dict[str, tuple[int, int]]:
        """Ranges written: (address, bytes)."""
        completions = {"completions": (self.completions_address, OPERATION_COMPLETION_BYTES * len(self.operations))}
        return completions | self._pages(OperationKind.READ)

    def _pages(self, kind: OperationKind) -> dict[str, tuple[int, int]]:
        return {
            f"page {index}": (operation.address, operation.sealed_bytes)
            for index, operation in enumerate(self.operations)
            if operation.kind is kind
        }

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError or AlignmentError where the kernel would reject the whole batch."""
        if not isinstance(config, AttendConfig) or not config.luns:
            raise CommandError(f"page operations must go to an attend kernel with NAND, not to {config.full_name}")
        if not 0 < len(self.operations) <= OPERATIONS_MAX:
            raise CommandError(f"a batch must hold 1 to {OPERATIONS_MAX} page operations, not {len(self.operations)}")
        for name, unit in _UNITS.items():
            if getattr(self, name) % unit:
                raise AlignmentError(f"{name} must be a multiple of {unit} bytes, not {getattr(self, name):#x}")

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""
        return {
            "command": AttendCommand.PAGES,
            "count": len(self.operations),
            "descriptors_address": self.operations_address,
            "completions_address": self.completions_address,
            "contexts": 1,
        }
