"""Test vectors: one head with its tensors, and how a kernel's result differs from the model's."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import HeadCompletion
from nearflash.abi.attention.faults import REFERENCE_FAULTS
from nearflash.abi.python310 import Self
from nearflash.model.attention.head import HeadResult, attend, attend_repeated
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.traffic import traffic

__all__ = ["TestVector", "differences"]


@dataclass(frozen=True)
class TestVector:
    """One head: its tensors, and how it is attended to."""

    __test__: ClassVar[bool] = False  # its name begins with Test, and pytest would collect it

    settings: HeadSettings
    page_tag: PageTag
    q: NDArray[np.float16]
    """(g, d)."""
    k: NDArray[np.float16]
    """(S, d)."""
    v: NDArray[np.float16]
    """(S, d)."""
    v_mean: NDArray[np.float32]
    """(d,)."""

    @classmethod
    def of(
        cls,
        settings: HeadSettings,
        page_tag: PageTag,
        q: "NDArray[np.floating[Any]]",  # NumPy 1.21 has no floating[]
        k: "NDArray[np.floating[Any]]",  # NumPy 1.21 has no floating[]
        v: "NDArray[np.floating[Any]]",  # NumPy 1.21 has no floating[]
    ) -> Self:
        """A head of these tensors, rounded to fp16, and the mean of V."""
        narrow = v.astype(np.float16)
        mean = narrow.mean(axis=0, dtype=np.float64).astype(np.float32)
        return cls(settings, page_tag, q.astype(np.float16), k.astype(np.float16), narrow, mean)

    def result(self, *, repeated: bool = False) -> HeadResult:
        """Compute the model's result; `repeated` as the driver repeats it."""
        compute = attend_repeated if repeated else attend
        return compute(self.q, self.k, self.v, self.v_mean, self.settings)

    def completion(self, result: HeadResult) -> HeadCompletion:
        """Build what the kernel has to write back."""
        pages = traffic(self.settings, result.score_dims, result.chosen).all.requests
        return result.completion(pages)


def differences(
    vector: TestVector, completion: HeadCompletion, out: NDArray[np.float16] | None, *, repeated: bool = False
) -> str:
    """How a kernel's result differs from the model's; empty where it does not."""
    result = vector.result(repeated=repeated)
    wanted, differing = vector.completion(result), []
    names = ["faults", "entries"]
    if not result.faults & ~REFERENCE_FAULTS:
        names += ["selected", "pages"]
        maximum = (*wanted.maximum, *[-32768] * (8 - len(wanted.maximum)))
        if completion.maximum != maximum:
            differing.append(f"maximum must be {maximum}, not {completion.maximum}")
    for name in names:
        if getattr(completion, name) != getattr(wanted, name):
            differing.append(f"{name} must be {getattr(wanted, name)!r}, not {getattr(completion, name)!r}")
    if (out is None) != (result.out is None):
        differing.append(f"out must be {result.out}, not {out}")
    elif out is not None and result.out is not None:
        wrong = (out.view(np.uint16) != result.out.view(np.uint16)).sum()
        if wrong:
            differing.append(f"{wrong} of {out.size} outputs differ")
    return "; ".join(differing)
