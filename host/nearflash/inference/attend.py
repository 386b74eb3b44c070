"""Attention of one decoding step, from plain arrays: K and V stored, q attended, the output back."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import FormatError, NonFiniteError, ShapeError
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import CPU, open_engine
from nearflash.storage.kv import KvShape

__all__ = ["attend"]


def attend(
    q: NDArray[np.floating[Any]],
    k: NDArray[np.floating[Any]],
    v: NDArray[np.floating[Any]],
    *,
    policy: AttentionPolicy | str = "dense",
    device: str = CPU,
    nand_block_pages: int = 0,
    scaling: float | None = None,
) -> NDArray[np.float32]:
    """Attention output (heads, dim) of the last of `tokens` tokens over all of them, of one layer.

    q: (heads, dim); k, v: (kv_heads, tokens, dim), each KV head shared by heads / kv_heads query heads, as in
    grouped-query attention. All are rounded to fp16.
    policy: what is read of K and V: an AttentionPolicy, or the name of an AttentionMode with its defaults.
    device: as `open_engine` takes it, for example `verilator` or `model`.
    nand_block_pages: pages of a block of the device's NAND, to which K and V are then programmed; 0: its memory.
    scaling: of q·K, 1/sqrt(dim) by default.

    Raises ShapeError and FormatError for arrays that do not fit together, NonFiniteError for what is
    not finite in fp16, and what `open_engine` raises. To attend step after step, keep the engine of `open_engine` open.
    """
    attention_policy = policy if isinstance(policy, AttentionPolicy) else AttentionPolicy(policy)  # type: ignore[arg-type]
    queries, keys, values = (_fp16(name, array) for name, array in (("q", q), ("k", k), ("v", v)))
    if keys.ndim != 3 or not keys.size:
        raise ShapeError(f"k must have the shape (kv_heads, tokens, dim), each at least 1, not {keys.shape}")
    kv_heads, tokens, dim = keys.shape
    if values.shape != keys.shape:
        raise ShapeError(f"v must have the shape of k, {keys.shape}, not {values.shape}")
    if queries.ndim != 2 or queries.shape[1] != dim or not len(queries) or len(queries) % kv_heads:
        raise ShapeError(f"q must have the shape (a multiple of {kv_heads} heads, {dim}), not {queries.shape}")
    shape = KvShape(layers=1, kv_heads=kv_heads, dim=dim)
    with open_engine(
        shape, attention_policy, tokens=tokens, sequences=1, device=device, nand_block_pages=nand_block_pages
    ) as engine:  # fmt: skip
        sequence = engine.add()
        engine.append(sequence, 0, keys, values)
        out = engine.attend(0, [sequence], queries.reshape(1, kv_heads, -1, dim), scaling)
    return out.reshape(queries.shape)


def _fp16(name: str, array: NDArray[np.floating[Any]]) -> NDArray[np.float16]:
    if not np.issubdtype(array.dtype, np.floating):
        raise FormatError(f"{name} must be floating point, not {array.dtype}")
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise NonFiniteError(f"{name} must be finite in fp16, not NaN or beyond 65504 in magnitude")
    return narrow
