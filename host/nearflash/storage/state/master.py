"""The fp32 master and its two halves, on whole arrays (nearflash.abi.optimizers.state has the definition)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["join_master", "round_master", "split_master"]

_NAN = np.uint32(0x7FC00000)
_INFINITY, _MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


def round_master(p: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Patterns of the bf16 weights of masters, (n,): to nearest, ties away from zero."""
    return split_master(p)["weight"]


def split_master(p: NDArray[np.float32]) -> dict[str, NDArray[np.uint16]]:
    """The halves of masters, (n,). A NaN whose lower half is not zero becomes the canonical one."""
    words = p.view(np.uint32)
    low = words.astype(np.uint16)
    odd = (words & _MAGNITUDE > _INFINITY) & (low > 0)
    if odd.any():
        words = np.where(odd, _NAN, words)
        low = words.astype(np.uint16)
    return {"weight": (words + np.uint32(0x8000) >> np.uint32(16)).astype(np.uint16), "rest": low}


def join_master(halves: Mapping[str, NDArray[np.uint16]], out: NDArray[np.float32]) -> None:
    """Write the masters of halves into `out`, (n,)."""
    words = out.view(np.uint32)
    np.left_shift(halves["weight"], 16, out=words, dtype=np.uint32)
    words += halves["rest"].view(np.int16).astype(np.int32).view(np.uint32)
