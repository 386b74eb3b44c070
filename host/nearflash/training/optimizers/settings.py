"""Keyword arguments that all near-storage optimizers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearflash.abi.commands import CopyFormat
from nearflash.abi.errors import CommandError, FormatError
from nearflash.abi.optimizers import Profile, StateFormat
from nearflash.device import Device
from nearflash.storage.state.manifest import EXTENT_PARAMS
from nearflash.training.gradients.compression import TopK
from nearflash.training.gradients.scaler import LossScale
from nearflash.training.step.timeline import Timeline

__all__ = ["STATE_NAME", "Settings"]

STATE_NAME = "optimizer.state"
"""File name inside a directory given as `path`; `optimizer.1.state` and so on for further devices."""


CACHED_EXTENT_PARAMS = EXTENT_PARAMS // 4
"""So small that the extents that go round in a step stay in a processor's cache."""


@dataclass(frozen=True)
class Settings:
    """Raises CommandError, FormatError."""

    path: str | Path | Sequence[str | Path]
    """The state file, one for each device; a directory gets `optimizer.state` (a file for each device)."""
    device: str | Device | Sequence[str | Device] = "host"
    """Names for `open_device`, or open Devices (then not closed by `close`)."""
    stripe_ratio: Sequence[int] | None = None
    """Extents of each file of a new state in a round; even unless given."""
    profile: Profile | str = Profile.IEEE
    """Operation order of the update."""
    state_format: StateFormat | str = StateFormat.FP32
    """How the arrays beside the parameters are stored."""
    copy: Literal["fp16", "bf16"] | None = None
    """None when all parameters are fp32; else what those of lower precision are."""
    resume: bool | Literal["auto"] = False
    """False makes new files and refuses existing ones; True needs them and loads their parameters into the tensors;
    "auto" does what the paths call for."""
    extent_params: int | None = None
    """Parameters per chunk of I/O, a multiple of 1024; a resumed store keeps its own. None: 2^18 where the drive sets
    the pace, 2^20 where the processor does (narrow state, compression, resident extents)."""
    direct: bool = True
    """False goes through the page cache, for file systems without O_DIRECT."""
    timeline: Timeline | None = None
    """Where the spans of each step are noted; a new one unless given."""
    max_grad_norm: float | None = None
    """Gradients of a larger global norm are scaled down to it."""
    loss_scale: LossScale | Literal["dynamic"] | float | None = None
    """What gradients are divided by, `scale_loss` having multiplied the loss; steps that overflow are skipped."""
    compression: TopK | None = None
    """Send only the largest elements of gradients."""
    overlap: Literal["step", "backward"] = "step"
    """When updates begin: in `step`, or while backward runs."""
    resident_bytes: int = 0
    """Device memory for extents that the next step then need not read, over all devices."""

    def __post_init__(self) -> None:
        for name, kind in (("profile", Profile), ("state_format", StateFormat)):
            if getattr(self, name) not in list(kind):
                raise FormatError(f"{name} must be one of {', '.join(kind)}, not {getattr(self, name)!r}")
        if self.copy not in _COPIES:
            raise FormatError(f"copy must be None, 'fp16' or 'bf16', not {self.copy!r}")
        norm = self.max_grad_norm
        for name, holds, rule in (
            ("max_grad_norm", norm is None or 0 < norm < float("inf"), "None or positive and finite"),
            ("overlap", self.overlap in ("step", "backward"), "'step' or 'backward'"),
            ("resident_bytes", self.resident_bytes >= 0, "at least 0"),
        ):
            if not holds:
                raise CommandError(f"{name} must be {rule}, not {getattr(self, name)!r}")
        if len(self.paths) != len(self.devices):
            raise CommandError(f"path must name {len(self.devices)} files, one for each device, not {len(self.paths)}")

    @property
    def new_extent_params(self) -> int:
        """Parameters of an extent of a new store: few, of which several fit a processor's cache, or many a call."""
        if self.extent_params is not None:
            return self.extent_params
        processor = self.state_format != StateFormat.FP32 or self.compression is not None or self.resident_bytes > 0
        return EXTENT_PARAMS if processor else CACHED_EXTENT_PARAMS

    @property
    def copy_format(self) -> CopyFormat:
        """What the devices make for parameters of low precision."""
        return _COPIES[self.copy]

    @property
    def devices(self) -> tuple[str | Device, ...]:
        """One or more devices."""
        return (self.device,) if isinstance(self.device, str | Device) else tuple(self.device)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The state files, by device."""
        given = [Path(self.path)] if isinstance(self.path, str | Path) else [Path(path) for path in self.path]
        if len(given) == 1 and given[0].is_dir():
            given *= len(self.devices)
        same = [given[:index].count(path) for index, path in enumerate(given)]
        return tuple(path / _name(before) if path.is_dir() else path for path, before in zip(given, same, strict=True))


_COPIES = {None: CopyFormat.NONE, "fp16": CopyFormat.FP16, "bf16": CopyFormat.BF16}


def _name(number: int) -> str:
    stem, _, ending = STATE_NAME.rpartition(".")
    return f"{stem}.{number}.{ending}" if number else STATE_NAME
