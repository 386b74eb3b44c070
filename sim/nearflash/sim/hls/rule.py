"""Rules of users' own: what an optimizer of theirs is to the host, beside its C++ struct."""

import inspect
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers import OptimizerStep, Profile, StateFormat

__all__ = ["F32", "HlsRule"]

F32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class HlsRule(OptimizerStep):
    """One step of a user's optimizer; subclasses add hyper-parameters, `ARRAYS`, `scalars` and `update`.

    The struct template of the same name stands in the file of the same stem beside the one that defines the class:
    `Amsgrad` of amsgrad.py in amsgrad.hpp. Arrays and scalars have the same names in both.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ()
    """State arrays beside p, in the order of `update`'s arguments; all start at zero."""

    lr: float
    step: int
    weight_decay: float = 0.0
    profile: Profile = Profile.IEEE
    state_format: StateFormat = StateFormat.FP32

    def __post_init__(self) -> None:
        self._check({}, ())

    def __init_subclass__(cls) -> None:
        cls.optimizer = cls.__name__.lower()

    @property
    def torch_names(self) -> dict[str, str]:
        """The arrays, by their own names."""
        return {name: name for name in self.ARRAYS}

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """Fields of the struct's Scalars, computed in double; they are rounded to fp32 once."""

    @staticmethod
    @abstractmethod
    def update(c: Any, g: F32, p: F32, *arrays: F32) -> tuple[F32, ...]:
        """p and the arrays after the step, each (n,); `c` has the scalars as fp32 attributes.

        Numpy rounds every operation to fp32, as profile ieee does.
        """

    def reference(self, g: F32, p: F32, *arrays: F32) -> tuple[F32, ...]:
        """`update` with this step's scalars; inputs and results fp32, (n,)."""
        scalars = SimpleNamespace(**{name: np.float32(value) for name, value in self.scalars().items()})
        with np.errstate(all="ignore"):
            return tuple(np.asarray(x, np.float32) for x in self.update(scalars, g, p, *arrays))

    @classmethod
    def header(cls) -> Path:
        """The file of the C++ struct."""
        return Path(inspect.getfile(cls)).with_suffix(".hpp")
