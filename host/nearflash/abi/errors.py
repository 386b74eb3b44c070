"""Named errors: each states what was wrong, what it should have been, and what to do next.

Every error that nearflash raises on bad input derives from `NearflashError`, and from the builtin that a caller
would expect (`ValueError`, `TimeoutError`, …). Bad input never changes stored state.
"""

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AddressError",
    "AlignmentError",
    "BitstreamError",
    "CommandError",
    "ConfigError",
    "DeviceError",
    "DeviceLostError",
    "DigestError",
    "FormatError",
    "LostStepWarning",
    "NearflashError",
    "NoGradientWarning",
    "NonFiniteError",
    "OtherWeightsWarning",
    "PageError",
    "PlanError",
    "ReadOnlyError",
    "ReplayError",
    "ShapeError",
    "StateError",
    "StorageFullError",
    "StreamError",
    "UncheckedWarning",
    "UnknownDeviceError",
    "UnmarkedStateWarning",
    "UnsupportedError",
    "WaitTimeoutError",
    "WeightsError",
]


class NearflashError(Exception):
    """Base of every error raised by nearflash."""


class ConfigError(NearflashError, ValueError):
    """A build configuration that does not exist or whose parameters do not fit together."""


class UnknownDeviceError(NearflashError, LookupError):
    """No backend or configuration of that name; the message lists what exists. There is no fallback."""


class DigestError(NearflashError):
    """The device was built from another configuration than the host expects."""


class BitstreamError(NearflashError, ValueError):
    """A bitstream whose manifest or files are missing, malformed, or not what was built."""


class AddressError(NearflashError, ValueError):
    """A range that lies outside the device's memory, or outside one allocated buffer."""


class AlignmentError(NearflashError, ValueError):
    """An address, offset or length that is not a multiple of what the port or the file needs."""


class ShapeError(NearflashError, ValueError):
    """A tensor whose shape or element count is not the one that was registered."""


class FormatError(NearflashError, TypeError):
    """A number format (dtype) that the operation does not support."""


class CommandError(NearflashError, ValueError):
    """A command whose scalars or program are out of range (a beta of 1, a negative step)."""


class PlanError(NearflashError, ValueError):
    """A model's shape, machine profile or plan that is malformed, does not belong together, or does not fit."""


class NonFiniteError(NearflashError, ArithmeticError):
    """NaN or infinity in a gradient: nothing was updated."""


class DeviceError(NearflashError, RuntimeError):
    """The device finished a command with a fault; the message gives status, address and what to do."""


class DeviceLostError(DeviceError):
    """A device is gone: a card answers no more, or one of an array failed. The message names it and what is lost."""


class StreamError(DeviceError, ValueError):
    """Compressed gradients or weights that are damaged or malformed. Nothing of them is used.

    Of gradients, the state stays that of the previous step: the slot that was written to is discarded.
    """

    def __init__(self, message: str, fault: int) -> None:
        super().__init__(message)
        self.fault = fault
        """Which rule it breaks: a StreamFault (nearflash.abi.topk)."""


class WaitTimeoutError(NearflashError, TimeoutError):
    """A device did not finish in time; the message names the streams that wait."""


class StateError(NearflashError, OSError):
    """State on flash that is missing, short, misaligned, misdirected or damaged; it is never used and never changed."""


class WeightsError(NearflashError, ValueError):
    """A file of weights is damaged or of a newer version, or holds other tensors than those asked for."""


class StorageFullError(StateError):
    """No room for the state; nothing that was stored before has changed."""


class ReadOnlyError(StateError):
    """Flash whose bad blocks nothing can replace any more: nothing is written, all that was durable can be read."""


class PageError(StateError):
    """Pages of flash that are erased, damaged or another page tag's; the message names the first."""

    def __init__(self, message: str, pages: Sequence[tuple[int, Any]] = ()) -> None:
        super().__init__(message)
        self.pages = tuple(pages)
        """Of each wrong page: its number on the flash, and the key that it should have had."""


class ReplayError(NearflashError):
    """A run that differs from the recorded transcript."""


class UnsupportedError(NearflashError, NotImplementedError):
    """A request that KV on flash cannot serve (remove tokens, reorder a batch), or what no device computes."""


class UncheckedWarning(UserWarning):
    """A file of another writer, without checksums: that it is what was written, nothing tells."""


class UnmarkedStateWarning(UserWarning):
    """A state without a mark of the optimizer that made it is taken as this one's: nothing in it tells."""


class NoGradientWarning(UserWarning):
    """A step found no parameter with a gradient, so that it did nothing and counted nothing."""


class LostStepWarning(UserWarning):
    """A state opens at the step before its newest one, whose superblock is damaged; the message has both numbers."""


class OtherWeightsWarning(UserWarning):
    """A policy calibrated for other weights is used: results stay attention's, but what it leaves out is not known."""
