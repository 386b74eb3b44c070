"""A call's attention mask, read as tokens that are stored and seen, and checked before anything is stored."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.errors import UnsupportedError

__all__ = ["Columns", "read_mask"]

_HIDES = -1e4
"""Of a bias: a column's share in the softmax is then 0 in fp32."""


class Columns(NamedTuple):
    """The columns of a call, by its mask."""

    kept: NDArray[np.bool_] | None
    """(batch, new): which of the new tokens are stored; the others are padding. None: all."""
    visible: list[NDArray[np.bool_]] | None = None
    """Of each row (new, tokens): which of its stored tokens, the new ones included, each query sees; None: all up to
    its own, and what the others are given does not matter."""


def read_mask(mask: Tensor | None, stored: NDArray[np.bool_], new: int, takes_masks: bool) -> Columns:
    """The columns of a call of `new` tokens behind the `stored` ones (batch, columns).

    mask: (batch or 1, heads or 1, new, columns + new), true or 0 where a query sees a column. None: it sees all up to
    itself. A new token that no query sees is padding. takes_masks: of the engine.
    Raises UnsupportedError for a mask of another size, with biases, or that differs between heads; for one that shows
    padding, which is not stored; and for one that is not plain where the engine takes none.
    """
    batch, before = stored.shape
    if mask is None:
        if not stored.all():
            raise _mask_error("must be given again", "None: some columns are padding, which is not stored")
        return Columns(None)
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or tuple(mask.shape[2:]) != (new, before + new):
        wanted = f"of {batch} rows, {new} queries and {before + new} columns, those stored and the new ones"
        raise _mask_error(f"must be {wanted}", f"of shape {tuple(mask.shape)}")
    if new == 1 and stored.all() and bool((mask if mask.dtype == torch.bool else mask == 0).all()):
        return Columns(None)  # most calls, on whatever device the mask is
    seen = np.broadcast_to(_read_seen(mask), (batch, new, before + new))
    kept: NDArray[np.bool_] = np.asarray(seen[:, :, before:].any(axis=1))
    held = np.concatenate([stored, kept], axis=1)
    if (shown := (seen & ~held[:, None]).any(axis=(1, 2)).nonzero()[0]).size:
        raise _mask_error("must hide padding as before", f"show it in row {int(shown[0])}: it is not stored")
    kept_or_all: NDArray[np.bool_] | None = None if kept.all() else kept
    if not before or _is_plain(seen, held, before):
        return Columns(kept_or_all)
    if not takes_masks:
        raise _mask_error(
            "must show each token all before it on this engine", "hide some: attend with device cpu or cuda"
        )
    return Columns(kept_or_all, [row_seen[:, columns] for row_seen, columns in zip(seen, held, strict=True)])


def _is_plain(seen: NDArray[np.bool_], held: NDArray[np.bool_], before: int) -> bool:
    """Whether each new token sees all stored ones of its row up to itself, and the last query is no padding.

    A row that is padding alone so far sees nothing that matters.
    """
    new = seen.shape[1]
    causal = np.arange(before + new) <= before + np.arange(new)[:, None]
    kept = held[:, before:]
    alike = ~((seen != held[:, None] & causal) & kept[:, :, None]).any()
    return bool(alike and (kept[:, -1] | ~held.any(axis=1)).all())


def _read_seen(mask: Tensor) -> NDArray[np.bool_]:
    """(batch, new, columns): what queries see."""
    seen = mask
    if mask.dtype != torch.bool:
        seen = mask == 0
        if not bool((seen | (mask <= _HIDES)).all()):
            raise _mask_error("must hide a column or show it", "add a bias to its score")
    if not bool((seen == seen[:, :1]).all()):
        raise _mask_error("must be the same for all heads", "another one for some")
    seen_by_head: NDArray[np.bool_] = seen[:, 0].cpu().numpy()
    return seen_by_head


def _mask_error(rule: str, found: str) -> UnsupportedError:
    return UnsupportedError(f"attention_mask with KV on flash {rule}, not {found}")
