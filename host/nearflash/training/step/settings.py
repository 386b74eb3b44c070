"""Keyword arguments that all near-storage optimizers share: `StepSettings` is the one place with defaults and meanings.

`Options` repeats names and types for type checkers and editors (PEP 692); a test keeps the two equal.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Required, Self, TypedDict

import torch

from nearflash.abi.errors import CommandError, FormatError, StateError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import MasterFormat, Profile, StateFormat
from nearflash.device import Device
from nearflash.storage.state.manifest import EXTENT_PARAMS
from nearflash.support.timeline import Timeline
from nearflash.training.gradients.compression import TopK
from nearflash.training.gradients.scaler import LossScale

__all__ = ["STATE_NAME", "Options", "StepSettings", "document"]

STATE_NAME = "optimizer.state"
"""File name inside a directory given as `path`; `optimizer.1.state` and so on for further devices."""
DOC = "doc"
"""Key of a field's meaning."""
CACHED_EXTENT_PARAMS = EXTENT_PARAMS // 4
"""So small that the extents in flight in a step stay in a processor's cache."""
NARROW_EXTENT_PARAMS = 4 * EXTENT_PARAMS
"""So large that calls for an extent are few beside its work: with moments of 8 bits 8 to 17 MB."""
TORCH_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""Of torch's constructors. The first two choose how torch computes and have no meaning here, the last two are False."""


class Options(TypedDict, total=False):
    """Keyword arguments of every near-storage optimizer; meanings and defaults: `StepSettings`."""

    path: Required[str | Path | Sequence[str | Path]]
    device: str | Device | Sequence[str | Device]
    stripe_ratio: Sequence[int] | None
    profile: Profile | str
    state_format: StateFormat | str
    master: MasterFormat | str
    param_dtype: Literal["fp32", "fp16", "bf16"] | None
    resume: bool | Literal["auto", "exact"]
    extent_params: int | None
    direct: bool
    timeline: Timeline | None
    max_grad_norm: float | None
    loss_scale: LossScale | Literal["dynamic"] | float | None
    compression: TopK | None
    overlap: Literal["step", "backward"]
    free_gradients: bool
    resident_bytes: int
    delta_bytes: int
    sum_of_squares: Callable[[Iterable[torch.Tensor]], float] | None
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


@dataclass(frozen=True)
class StepSettings:
    """Options that were checked. Raises CommandError, FormatError."""

    path: str | Path | Sequence[str | Path] = field(
        metadata={DOC: f"State file, one for each device. A directory gets `{STATE_NAME}` (a file for each device)."}
    )
    device: str | Device | Sequence[str | Device] = field(
        default="host",
        metadata={
            DOC: "Name for `open_device` (`host` updates on the processor), or an open Device, which `close` leaves "
            "open; or a list of them."
        },
    )
    stripe_ratio: Sequence[int] | None = field(
        default=None, metadata={DOC: "Extents of each file of a new state in a round, for example `(2, 1)`; else even."}
    )
    profile: Profile | str = field(
        default=Profile.IEEE, metadata={DOC: "Operation order of the update: `ieee`, `torch_fused` or `deepspeed`."}
    )
    state_format: StateFormat | str = field(
        default=StateFormat.FP32, metadata={DOC: "Stored format of the moments: `fp32`, `bf16` or `mx8`."}
    )
    master: MasterFormat | str = field(
        default=MasterFormat.FP32,
        metadata={
            DOC: "Stored format of the fp32 masters: `fp32`, or, where trained parameters are bf16 (some may be fp32), "
            "`split`: the weight, of which steps write what changes, and 16 bits beside it. Weights then are rounded "
            "to nearest, ties away from zero. A resumed state needs the one that it has."
        },
    )
    param_dtype: Literal["fp32", "fp16", "bf16"] | None = field(
        default=None,
        metadata={DOC: "Refuse parameters that are neither fp32 nor of this dtype. None takes fp32, fp16 and bf16."},
    )
    resume: bool | Literal["auto", "exact"] = field(
        default=False,
        metadata={
            DOC: "False makes new files and rejects existing ones. True needs them and loads their parameters into the "
            'tensors. "exact" rejects a state whose newest step is damaged; the others open the step before, with a '
            'LostStepWarning. "auto" resumes where the files exist.'
        },
    )
    extent_params: int | None = field(
        default=None,
        metadata={
            DOC: "Parameters of an extent, the unit of I/O: a multiple of 1024. A resumed state keeps its own. None "
            "chooses by what limits the step: the drive, or the processor."
        },
    )
    direct: bool = field(
        default=True,
        metadata={DOC: "False uses the page cache, for file systems without O_DIRECT."},
    )
    timeline: Timeline | None = field(
        default=None, metadata={DOC: "Records the spans of each step; a new one unless given."}
    )
    max_grad_norm: float | None = field(
        default=None, metadata={DOC: "Gradients of a larger global norm are scaled down to it."}
    )
    loss_scale: LossScale | Literal["dynamic"] | float | None = field(
        default=None,
        metadata={
            DOC: "Gradients are divided by it, after `scale_loss` multiplied the loss. Steps that overflow are skipped."
        },
    )
    compression: TopK | None = field(
        default=None, metadata={DOC: "`TopK(ratio)` sends only the largest elements of the gradients."}
    )
    overlap: Literal["step", "backward"] = field(
        default="step", metadata={DOC: 'When updates begin: in `step`, or ("backward") while backward runs.'}
    )
    free_gradients: bool = field(
        default=False,
        metadata={
            DOC: 'With `overlap="backward"`: gradients go to a scratch file beside the state as backward completes '
            "them, and `p.grad` is None again; `step` reads them, with the factor of clipping."
        },
    )
    resident_bytes: int = field(
        default=0, metadata={DOC: "Device memory, over all devices, for extents that the next step need not read."}
    )
    delta_bytes: int = field(
        default=0,
        metadata={
            DOC: "Bytes that may lie beside the first state file, in a folder `….deltas`, of which weights each of the "
            "last steps changed, for `delta(since=step)`. 0 keeps nothing."
        },
    )
    sum_of_squares: Callable[[Iterable[torch.Tensor]], float] | None = field(
        default=None,
        metadata={
            DOC: "Norm hook: called with this optimizer's gradients, it returns the sum of squares of all gradients "
            "that the global norm is of, those of other ranks included."
        },
    )

    @classmethod
    def of(cls, owner: str, options: Options) -> Self:
        """From the keyword arguments of class `owner`. Raises TypeError for an unknown or missing one."""
        given: dict[str, Any] = dict(options)
        for name in TORCH_FLAGS:
            if given.pop(name, None) and name in ("capturable", "differentiable"):
                raise CommandError(f"{name} must be False, not True: the update is none of torch's own; leave it out")
        known = [setting.name for setting in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {unknown[0]!r}; its options are {', '.join(known)}"
            )
        if "path" not in given:
            raise TypeError(f"{owner}() missing the required keyword argument 'path': the state file")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.resume not in (True, False, "auto", "exact"):
            raise CommandError(f'resume must be True, False, "auto" or "exact", not {self.resume!r}')
        for name, kind in (("profile", Profile), ("state_format", StateFormat), ("master", MasterFormat)):
            if getattr(self, name) not in list(kind):
                raise FormatError(f"{name} must be one of {', '.join(kind)}, not {getattr(self, name)!r}")
        if self.param_dtype not in _COPIES:
            raise FormatError(f"param_dtype must be None, 'fp32', 'fp16' or 'bf16', not {self.param_dtype!r}")
        if self.master == MasterFormat.SPLIT and self.param_dtype not in (None, "bf16"):
            raise FormatError(f"param_dtype must be None or 'bf16' with a split master, not {self.param_dtype!r}")
        norm = self.max_grad_norm
        for name, holds, rule in (
            ("max_grad_norm", norm is None or 0 < norm < float("inf"), "None or positive and finite"),
            ("overlap", self.overlap in ("step", "backward"), "'step' or 'backward'"),
            (
                "free_gradients",
                self.overlap == "backward" or not self.free_gradients,
                'False with overlap="step", which leaves gradients where they are',
            ),
            (
                "free_gradients",
                self.sum_of_squares is None or not self.free_gradients,
                "False with sum_of_squares, which looks at gradients in memory",
            ),
            ("resident_bytes", self.resident_bytes >= 0, "at least 0"),
            ("delta_bytes", self.delta_bytes >= 0, "at least 0"),
        ):
            if not holds:
                raise CommandError(f"{name} must be {rule}, not {getattr(self, name)!r}")
        if len(self.paths) != len(self.devices):
            raise CommandError(f"path must name {len(self.devices)} files, one for each device, not {len(self.paths)}")

    @property
    def new_extent_params(self) -> int:
        """Parameters of an extent of a new store: few, of which several fit a processor's cache, or many a call.

        Narrow state has a quarter of the bytes: more parameters make extents as long, and calls as few.
        """
        if self.extent_params is not None:
            return self.extent_params
        if self.state_format != StateFormat.FP32:
            return NARROW_EXTENT_PARAMS
        processor = self.compression is not None or self.resident_bytes > 0
        return EXTENT_PARAMS if processor else CACHED_EXTENT_PARAMS

    @property
    def speculates(self) -> bool:
        """Whether updates begin during backward, while the tensors are read."""
        return self.overlap == "backward" and not self.free_gradients

    @property
    def copy_format(self) -> CopyFormat | None:
        """Only format that the devices make for parameters of low precision; None: that of each parameter."""
        return _COPIES[self.param_dtype]

    @property
    def devices(self) -> tuple[str | Device, ...]:
        """One or more devices."""
        return (self.device,) if isinstance(self.device, str | Device) else tuple(self.device)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The state files, by device. Raises StateError for a name that no file can have."""
        names = [self.path] if isinstance(self.path, str | Path) else self.path
        if not isinstance(names, list | tuple) or any(not isinstance(name, str | Path) for name in names):
            raise CommandError(f"path must be a file's name, or a list of them, one a device, not {self.path!r}")
        if any("\0" in str(name) or not str(name) for name in names):
            raise CommandError(f"path must be a name that a file can have, not {self.path!r}")
        given = [Path(name).absolute() for name in names]
        try:
            folders = {path: path.is_dir() for path in given}
        except OSError as error:
            raise StateError(
                f"{error.filename} cannot be a state file ({error.strerror}): choose another path"
            ) from error
        if len(given) == 1 and folders[given[0]]:
            given *= len(self.devices)
        same = [given[:index].count(path) for index, path in enumerate(given)]
        return tuple(path / _name(before) if folders[path] else path for path, before in zip(given, same, strict=True))


_COPIES = {None: None, "fp32": CopyFormat.NONE, "fp16": CopyFormat.FP16, "bf16": CopyFormat.BF16}


def _name(number: int) -> str:
    stem, _, ending = STATE_NAME.rpartition(".")
    return f"{stem}.{number}.{ending}" if number else STATE_NAME


def document(kind: type) -> None:
    """Let `help(kind)` list every option, in the signature of its constructor and with its meaning in the docstring."""
    if (constructor := vars(kind).get("__init__")) is None:
        return
    signature = inspect.signature(constructor)
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if len(parameters) == len(signature.parameters):
        return
    names = {parameter.name for parameter in parameters}
    more = [parameter for parameter in _parameters() if parameter.name not in names]
    constructor.__signature__ = signature.replace(parameters=[*parameters, *more])
    meanings = [
        f"    {setting.name}: {setting.metadata[DOC]}" for setting in fields(StepSettings) if setting.name not in names
    ]
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Options:", *meanings])


def _parameters() -> Iterator[inspect.Parameter]:
    for setting in fields(StepSettings):
        default = inspect.Parameter.empty if setting.default is MISSING else setting.default
        yield inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=setting.type)
