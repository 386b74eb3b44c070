"""Commands that a device takes, their register encoding, and the status that comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Protocol

from nearflash.abi.delta import longest_delta_bytes
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.formats import BF16, FP16, FP32, NumberFormat
from nearflash.abi.kernel.config import KernelConfig, UpdateConfig
from nearflash.abi.optimizers import MasterFormat, OptimizerStep
from nearflash.abi.optimizers.program import program_registers
from nearflash.abi.registers import DELTA_BIT, SPLIT_BIT, UPDATE
from nearflash.abi.topk import StreamFault

__all__ = [
    "AttendCommand",
    "Command",
    "Completion",
    "CopyFormat",
    "GradientFormat",
    "Status",
    "UpdateCommand",
]


class Status(IntEnum):
    """How a command ended; the first fault wins."""

    OK = 0
    READ_ERROR = 1
    """The memory answered a read with SLVERR or DECERR."""
    WRITE_ERROR = 2
    """The memory answered a write with SLVERR or DECERR."""
    MISALIGNED = 3
    """An address is not a multiple of what the kernel needs; nothing was read or written."""
    EMPTY = 4
    """The number of parameters, heads, page operations or elements is zero; nothing was read or written."""
    UNSUPPORTED = 5
    """The build does not know the command or the format, or a batch of page operations or a row is too long for it, or
    parameters in state format mx8 are not whole blocks; nothing was read or written."""
    STREAM_HEADER = 16 + StreamFault.HEADER
    """A Top-K stream or a bitmap matrix with the fault of that name (nearflash.abi.topk), as all that follow. Nothing
    was written since it was met; what was written before it is of no use: the slot is to be discarded."""
    STREAM_LENGTH = 16 + StreamFault.LENGTH
    STREAM_COUNT = 16 + StreamFault.COUNT
    STREAM_CHECKSUM = 16 + StreamFault.CHECKSUM
    STREAM_ORDER = 16 + StreamFault.ORDER
    STREAM_RANGE = 16 + StreamFault.RANGE

    @property
    def stream_fault(self) -> StreamFault:
        """Fault of the gradient stream or the matrix; NONE where the status is about something else."""
        return StreamFault(max(self - 16, 0))


class AttendCommand(IntEnum):
    """Action of a start of the attend kernel (register `command`)."""

    HEADS = 0
    """Attention of heads."""
    PAGES = 1
    """Page operations; builds with NAND units only."""


class Command(Protocol):
    """Input of a device: an UpdateCommand, an AttendBatch (nearflash.abi.attention.batch), a PageBatch beside it,
    or an
    ExpandCommand (nearflash.abi.kernel.expand)."""

    kernel: ClassVar[str]

    def reads(self) -> Mapping[str, tuple[int, int]]:
        """Ranges read, by name: (address, bytes)."""

    def writes(self) -> Mapping[str, tuple[int, int]]:
        """Ranges written, by name: (address, bytes)."""

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError or AlignmentError where the kernel of that configuration would refuse the command."""

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""


class CopyFormat(IntEnum):
    """Low-precision copy of the parameters (field `copy_format`)."""

    NONE = 0
    FP16 = 1
    BF16 = 2

    @property
    def number_format(self) -> NumberFormat | None:
        """Number format of the copy's elements."""
        return {CopyFormat.FP16: FP16, CopyFormat.BF16: BF16}.get(self)


class GradientFormat(IntEnum):
    """How the gradient of a command is stored."""

    FP32 = 0
    TOPK = 1
    """A Top-K stream (docs/contracts/gradients.md)."""
    BF16 = 2
    """bf16, each multiplied in fp32 by the command's `gradient_scale`, rounded once: devices in software only."""


@dataclass(frozen=True)
class UpdateCommand:
    """One optimizer step over `params` consecutive parameters.

    Addresses are device byte addresses; inputs and outputs may be the same ranges (update in place) or two slots.
    g and p are fp32, the rule's arrays have the rule's state format. A split master is weight and rest, not p.
    """

    kernel: ClassVar[str] = "update"

    rule: OptimizerStep
    params: int
    inputs: Mapping[str, int]
    """Addresses of what is read: g, the master's arrays, and the rule's."""
    outputs: Mapping[str, int]
    """Addresses of what is written: the master's arrays, the rule's, and `copy` where one is made."""
    copy: CopyFormat = CopyFormat.NONE
    gradient: GradientFormat = GradientFormat.FP32
    gradient_bytes: int = 0
    """Bytes of a Top-K stream; a dense gradient has its size from `params`."""
    first_param: int = 0
    """Index of the first parameter in the flat vector: what the dither of bf16 and mx8 state is a function of."""
    gradient_scale: float = 1.0
    """Factor of bf16 gradients, fp32; others come multiplied."""
    delta: bool = False
    """Write the delta (nearflash.abi.delta) from the copy of p to that of the new p, in the place of the copy."""
    master: MasterFormat = MasterFormat.FP32
    """How p is stored. The weight of a split master is its copy: none is made beside it, unless for its delta."""

    def reads(self) -> Mapping[str, tuple[int, int]]:
        """Ranges read, by array: (address, bytes)."""
        return self._reads

    def writes(self) -> Mapping[str, tuple[int, int]]:
        """Ranges written, by array: (address, bytes)."""
        return self._writes

    @cached_property
    def _reads(self) -> Mapping[str, tuple[int, int]]:
        dense = {GradientFormat.FP32: FP32.bytes, GradientFormat.BF16: BF16.bytes}.get(self.gradient)
        sizes = {"g": self.gradient_bytes if dense is None else self.params * dense} | self._state_bytes()
        return {name: (self.inputs[name], size_bytes) for name, size_bytes in sizes.items()}

    @cached_property
    def _writes(self) -> Mapping[str, tuple[int, int]]:
        sizes = self._state_bytes()
        if self.copy.number_format:
            value_bytes = self.copy.number_format.bytes
            sizes["copy"] = longest_delta_bytes(self.params, value_bytes) if self.delta else self.params * value_bytes
        return {name: (self.outputs[name], size_bytes) for name, size_bytes in sizes.items()}

    def _state_bytes(self) -> dict[str, int]:
        state_format = self.rule.state_format
        return {name: state_format.array_bytes(name, self.params) for name in self._state_arrays}

    @property
    def _state_arrays(self) -> tuple[str, ...]:
        return (*self.master.arrays, *self.rule.arrays)

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError or AlignmentError where the kernel would refuse the command."""
        if not isinstance(config, UpdateConfig):
            raise CommandError(f"an update must go to an update kernel, not to {config.full_name}")
        for name, value, known in (
            ("optimizer", self.rule.optimizer, config.optimizers),
            ("state_format", self.rule.state_format, config.state_formats),
            ("gradient", self.gradient.name.lower(), config.gradients),
            ("master", self.master, config.masters),
        ):
            if value not in known:
                raise CommandError(f"{name} must be {' or '.join(known)} on {config.full_name}, not {value}")
        if self.gradient_scale != 1.0 and self.gradient is not GradientFormat.BF16:
            raise CommandError(f"gradient_scale must be 1 but for bf16 gradients, not {self.gradient_scale!r}")
        self._check_delta(config)
        self._check_counts()
        if self.master is MasterFormat.SPLIT and self.copy is not (CopyFormat.BF16 if self.delta else CopyFormat.NONE):
            raise CommandError(
                f"copy of a split master must be {'BF16 for a delta' if self.delta else 'NONE, as its weight is one'}, "
                f"not {self.copy.name}"
            )
        self._check_names("inputs", set(self.inputs), {"g", *self._state_arrays})
        copy = {"copy"} if self.copy else set()
        self._check_names("outputs", set(self.outputs) - ({"copy"} - copy), {*self._state_arrays, *copy})
        for kind, ranges in (("read", self.reads()), ("write", self.writes())):
            for name, (address, _) in ranges.items():
                multiple = self._alignment(name, config.port_bytes)
                if address % multiple:
                    raise AlignmentError(
                        f"{name} {kind} address must be a multiple of {multiple} bytes, not {address:#x}"
                    )

    def _check_counts(self) -> None:
        block = self.rule.state_format.block_params
        if not 0 < self.params < 1 << 32:
            raise CommandError(f"params must be between 1 and 2^32 - 1, not {self.params!r}")
        if not 0 <= self.first_param < 1 << 40:
            raise CommandError(f"first_param must be between 0 and 2^40 - 1, not {self.first_param!r}")
        for name, value in (("params", self.params), ("first_param", self.first_param)):
            if value % block:
                raise CommandError(
                    f"{name} must be a multiple of {block} in state format {self.rule.state_format}, not {value!r}"
                )

    def _check_delta(self, config: UpdateConfig) -> None:
        if not self.delta:
            return
        if not config.delta:
            raise CommandError(f"delta must be False on {config.full_name}, which writes whole copies, not True")
        if self.copy.number_format is None:
            raise CommandError("copy must be FP16 or BF16 for a delta of it, not NONE")
        if longest_delta_bytes(self.params, self.copy.number_format.bytes) >= 1 << 32:
            raise CommandError(f"a delta must be below 4 GiB, not of {self.params} parameters; split the range")

    @staticmethod
    def _check_names(what: str, given: set[str], needed: set[str]) -> None:
        if given != needed:
            raise CommandError(
                f"{what} must be addresses of {', '.join(sorted(needed))}, not of {', '.join(sorted(given))}"
            )

    def _alignment(self, array: str, port_bytes: int) -> int:
        """Bytes of narrow state that as many parameters take as a port's width of fp32 words."""
        if array in self._state_arrays:
            return max(1, self.rule.state_format.array_bytes(array, port_bytes // FP32.bytes))
        return port_bytes

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name; addresses of absent arrays are zero."""
        values, split = program_registers(self.rule), self.master is MasterFormat.SPLIT
        formats = {"copy_format": self.copy, "topk": self.gradient, "state_format": self.rule.state_format.code}
        scales = ("m_scale", "v_scale")
        return {
            **values,
            "program": values["program"]
            | UPDATE["program"].pack(formats)
            | self.delta << DELTA_BIT
            | split << SPLIT_BIT,
            "params": self.params,
            "gradient_bytes": self.gradient_bytes,
            **{f"{name}_address": self.inputs.get(name, 0) for name in ("g", "p", "m", "v", *scales)},
            **{f"{name}_out_address": self.outputs.get(name, 0) for name in ("p", "m", "v", "copy", *scales)},
            **(self._split_registers() if split else {}),
            "step": self.rule.step & 0xFFFF_FFFF,
            "first_param": self.first_param,
        }

    def _split_registers(self) -> dict[str, int]:
        """Addresses of a split master: its weights have the place of p."""
        given = {"": self.inputs, "_out": self.outputs}
        names = {"p": "weight", "rest": "rest"}
        return {f"{name}{out}_address": given[out][array] for name, array in names.items() for out in given}


@dataclass(frozen=True)
class Completion:
    """Report of a finished command: its counters (see abi.counters)."""

    counters: dict[str, int]
