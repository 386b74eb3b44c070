"""Commands that a device takes, their register encoding, and the status that comes back."""

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol

from nearflash.abi.adam import AdamStep, Profile
from nearflash.abi.config import KernelConfig, UpdateConfig
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.formats import BF16, FP16, FP32, NumberFormat, fp32_bits
from nearflash.abi.registers import FACTOR_BITS, UPDATE

__all__ = [
    "AttendCommand",
    "Command",
    "Completion",
    "CopyFormat",
    "DecayMode",
    "Status",
    "UpdateCommand",
    "denominator_factor",
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
    """The number of parameters, heads or page operations is zero; nothing was read or written."""
    UNSUPPORTED = 5
    """The build does not know the command, or a batch of page operations is too long; nothing was read or written."""


class AttendCommand(IntEnum):
    """What a start of the attend kernel does (register `command`)."""

    HEADS = 0
    """Attention of heads."""
    PAGES = 1
    """Page operations; builds with NAND units only."""


class Command(Protocol):
    """What a device takes: an UpdateCommand, an AttendBatch (nearflash.abi.attend.batch), or a PageBatch beside it."""

    kernel: ClassVar[str]

    def reads(self) -> dict[str, tuple[int, int]]:
        """Ranges read, by name: (address, bytes)."""

    def writes(self) -> dict[str, tuple[int, int]]:
        """Ranges written, by name: (address, bytes)."""

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError or AlignmentError where the kernel of that configuration would refuse the command."""

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""


class DecayMode(IntEnum):
    """What the decay operation makes (field `decay_mode`)."""

    SCALE = 0
    SELF = 1
    GRADIENT = 2


class CopyFormat(IntEnum):
    """Low-precision copy of the parameters (field `copy_format`)."""

    NONE = 0
    FP16 = 1
    BF16 = 2

    @property
    def number_format(self) -> NumberFormat | None:
        """Number format of the copy's elements."""
        return {CopyFormat.FP16: FP16, CopyFormat.BF16: BF16}.get(self)


def denominator_factor(adam: AdamStep) -> int:
    """Register `denominator_factor`: what multiplies sqrt(v).

    Profile deepspeed: the fp32 scalar 1/sqrt(1 - beta2^t), exact. Others: the reciprocal of the fp32 scalar
    s = sqrt(1 - beta2^t), cut (not rounded) to 51 bits: times a 24-bit significand and rounded to nearest that equals
    the division by s, since a quotient of two 24-bit significands is at least 2^-49 (relative) off any rounding
    boundary.
    """
    inverse = adam.profile is not Profile.DEEPSPEED
    bits = fp32_bits(adam.bias_correction2_sqrt if inverse else adam.inverse_bias_correction2_sqrt)
    exponent, significand = (bits >> 23) - 127, (bits & 0x7FFFFF) | 0x800000
    if not 0 < bits < 0x7F800000 or bits >> 23 == 0:
        raise CommandError(f"1 - beta2^step must be a normal positive fp32 number; beta2 is {adam.beta2!r}")
    if not inverse:
        significand <<= FACTOR_BITS - 24
    elif significand == 1 << 23:
        significand, exponent = 1 << FACTOR_BITS - 1, -exponent
    else:
        significand, exponent = (1 << FACTOR_BITS + 23) // significand, -exponent - 1
    return UPDATE["denominator_factor"].pack({"significand": significand, "exponent": exponent & 0x3FF})


def _program(adam: AdamStep, copy: CopyFormat) -> int:
    fused = adam.profile is not Profile.IEEE
    torch, deepspeed = adam.profile is Profile.TORCH_FUSED, adam.profile is Profile.DEEPSPEED
    mode = DecayMode.SCALE
    if adam.weight_decay and not adam.decoupled:
        mode = DecayMode.GRADIENT
    elif adam.weight_decay and deepspeed:
        mode = DecayMode.SELF
    return UPDATE["program"].pack(
        {
            "decay_mode": mode,
            "decay_fused": fused,
            "m_difference": torch,
            "m_fused": fused,
            "v_square_first": deepspeed,
            "v_fused": fused,
            "denominator_fused": deepspeed,
            "p_fused": deepspeed,
            "copy_format": copy,
        }
    )


@dataclass(frozen=True)
class UpdateCommand:
    """One optimizer step over `params` consecutive parameters.

    Addresses are device byte addresses; inputs and outputs may be the same ranges (update in place) or two slots.
    p, m, v and g are fp32. `copy_out_address` is used when `copy` is not NONE.
    """

    kernel: ClassVar[str] = "update"

    adam: AdamStep
    params: int
    g_address: int
    p_address: int
    m_address: int
    v_address: int
    p_out_address: int
    m_out_address: int
    v_out_address: int
    copy: CopyFormat = CopyFormat.NONE
    copy_out_address: int = 0

    def reads(self) -> dict[str, tuple[int, int]]:
        """Ranges read, by stream: (address, bytes)."""
        return {k: (getattr(self, f"{k}_address"), self.params * FP32.bytes) for k in ("g", "p", "m", "v")}

    def writes(self) -> dict[str, tuple[int, int]]:
        """Ranges written, by stream: (address, bytes)."""
        ranges = {k: (getattr(self, f"{k}_out_address"), self.params * FP32.bytes) for k in ("p", "m", "v")}
        if self.copy.number_format:
            ranges["copy"] = (self.copy_out_address, self.params * self.copy.number_format.bytes)
        return ranges

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError or AlignmentError where the kernel would refuse the command."""
        if not isinstance(config, UpdateConfig):
            raise CommandError(f"an update must go to an update kernel, not to {config.full_name}")
        if not 0 < self.params < 1 << 32:
            raise CommandError(f"params must be between 1 and 2^32 - 1, not {self.params!r}")
        for kind, ranges in (("read", self.reads()), ("write", self.writes())):
            for name, (address, _) in ranges.items():
                if address % config.port_bytes:
                    raise AlignmentError(
                        f"{name} {kind} address must be a multiple of {config.port_bytes} bytes, not {address:#x}"
                    )

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""
        adam = self.adam
        torch = adam.profile is Profile.TORCH_FUSED
        post = -1.0 if torch else -adam.step_size
        scalars = {
            "decay": adam.decay if adam.weight_decay else 1.0,
            "m_decay": 1.0 if torch else adam.beta1,
            "m_gain": adam.one_minus_beta1,
            "v_decay": adam.beta2,
            "v_gain": adam.one_minus_beta2,
            "eps": adam.eps,
            "pre_scale": adam.step_size if torch else 1.0,
            "post_scale": post,
        }
        return {
            "program": _program(adam, self.copy),
            "params": self.params,
            **{f"{k}_address": address for k, (address, _) in self.reads().items()},
            **{f"{k}_out_address": getattr(self, f"{k}_out_address") for k in ("p", "m", "v", "copy")},
            **{name: fp32_bits(value) for name, value in scalars.items()},
            "denominator_factor": denominator_factor(adam),
        }


@dataclass(frozen=True)
class Completion:
    """What a finished command reports: its counters (see abi.counters)."""

    counters: dict[str, int]
