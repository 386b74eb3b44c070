"""Decode attention of one KV head, equal to the attend kernel to the bit (docs/contracts/attention.md, 1).

    dims ─► approximate scores ─► logits ─► entries ─► selection ─► gather of the chosen tokens ─► output

Pages change no number: `sparq` and `sparf` are the same, and traffic.py counts what is read.
A fault of q ends the head before its scan, one of the scores before its gather.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.descriptor import HeadCompletion, Mode
from nearflash.abi.attention.faults import REFERENCE_FAULTS, Fault
from nearflash.abi.errors import FormatError, ShapeError
from nearflash.model.attention.control.scan import approximate_scores, logit_scales, top_dims
from nearflash.model.attention.gather import Gathered, finish, gather
from nearflash.model.attention.memory.finite import finite
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.source import ArraySource, HeadSource
from nearflash.model.attention.numerics.logit import to_logit
from nearflash.model.attention.select.entries import entries
from nearflash.model.attention.select.selection import Selected, selection

__all__ = ["HeadResult", "attend", "attend_from", "attend_repeated", "choose_tokens"]

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
_GROUP_MAX = 8


@dataclass(frozen=True)
class HeadResult:
    """Result of one head."""

    faults: Fault
    score_dims: NDArray[np.int64]
    """Dims of the approximate score, ascending, (r,); none in dense attention."""
    chosen: NDArray[np.bool_]
    """J, (S,); none without a gather."""
    selected: int
    """Entries selected: tokens, or pages in page selection."""
    entries: int
    alpha: F32
    """(g,); empty without a gather."""
    references: tuple[int, ...]
    """References of the gather, by query head; empty without a gather."""
    sums: Gathered | None
    """None without a gather."""
    out: F16 | None
    """(g, d); None after a fault."""

    def completion(self, pages: int) -> HeadCompletion:
        """Build what the kernel writes back, with the page requests that it issued (Traffic.all.requests)."""
        return HeadCompletion(self.faults, self.selected, self.entries, pages, self.maximum)

    @property
    def maximum(self) -> tuple[int, ...]:
        """Floor of the largest base-2 logit of the chosen tokens, by query head; empty without a gather."""
        return self.sums.maximum if self.sums else ()


def attend(q: F16, k: F16, v: F16, v_mean: F32, settings: HeadSettings) -> HeadResult:
    """Attention of the query heads q (g, d) over k and v (S, d), with v_mean (d,) for what is left out.

    Raises FormatError for other dtypes, ShapeError for shapes that do not fit together or to `settings`.
    """
    _check(q, k, v, v_mean, settings)
    return attend_from(ArraySource(k, v, settings), q, v_mean, settings)


def attend_from(source: HeadSource, q: F16, v_mean: F32, settings: HeadSettings) -> HeadResult:
    """`attend` over what `source` finds, whose faults are the head's too."""
    scan = _choose(q, source, settings)
    if not scan.choice:
        return _without_gather(scan.faults, scan.score_dims, source.tokens, settings)
    mask, alpha = scan.choice.mask, scan.choice.alpha
    wanted = np.repeat(mask, settings.entry_tokens)[: source.tokens]
    references = settings.reference or scan.choice.references
    sums = gather(q, *source.read_chosen(wanted), settings.scale, references)
    before = scan.faults | source.faults
    faults = before | (sums.faults & ~Fault.REFERENCE_LOW if before else sums.faults)
    out = None if faults else finish(sums, alpha, v_mean)
    return HeadResult(faults, scan.score_dims, wanted, int(mask.sum()), len(mask), alpha, references, sums, out)


def attend_repeated(q: F16, k: F16, v: F16, v_mean: F32, settings: HeadSettings) -> HeadResult:
    """`attend`, once more with the returned maximum as reference where only the reference was at fault.

    What the driver does with such a completion.
    """
    result = attend(q, k, v, v_mean, settings)
    if not result.faults or result.faults & ~REFERENCE_FAULTS:
        return result
    again = replace(settings, mode=settings.mode | Mode.REFERENCE, reference=result.maximum)
    return attend(q, k, v, v_mean, again)


@dataclass(frozen=True)
class _Scan:
    """State of a head before its gather."""

    score_dims: NDArray[np.int64]
    choice: Selected | None
    """None after a fault of the scores."""
    faults: Fault


def choose_tokens(q: F16, source: HeadSource, settings: HeadSettings) -> NDArray[np.bool_] | None:
    """Which tokens (S,) `attend_from` gathers; None where a fault ends the head before. `read_chosen` is not called."""
    choice = _choose(q, source, settings).choice
    return None if choice is None else np.repeat(choice.mask, settings.entry_tokens)[: source.tokens]


def _choose(q: F16, source: HeadSource, settings: HeadSettings) -> _Scan:
    _, faults = finite(q)
    if faults:
        return _Scan(np.empty(0, np.int64), None, faults)
    return _dense(len(q), source.tokens, settings) if settings.mode & Mode.DENSE else _scan(q, source, settings)


def _dense(group: int, tokens: int, settings: HeadSettings) -> _Scan:
    ones = (1,) * group
    choice = Selected(np.ones(settings.entries(tokens), bool), settings.reference, numerator=ones, denominator=ones)
    return _Scan(np.empty(0, np.int64), choice, Fault(0))


def _scan(q: F16, source: HeadSource, settings: HeadSettings) -> _Scan:
    """Approximate scores, and the entries that they choose."""
    dims, tokens = top_dims(q, settings.score_dims), source.tokens
    scores, faults = approximate_scores(q[:, dims], source.blocks(dims), source.suffix(dims))
    faults |= source.faults
    if faults:
        return _Scan(dims, None, faults)
    logits, saturated = to_logit(scores, logit_scales(q, dims, settings.scale)[:, None])
    beyond = settings.entries(tokens)
    choice = selection(
        entries(logits, settings.entry_tokens),
        settings.top_k,
        max(0, tokens - settings.local_window) // settings.entry_tokens if settings.local_window else beyond,
        probability=bool(settings.mode & Mode.PROBABILITY),
        mass=settings.top_p,
    )
    return _Scan(dims, choice, Fault.SCORE_RANGE if saturated.any() else Fault(0))


def _without_gather(faults: Fault, dims: NDArray[np.int64], tokens: int, settings: HeadSettings) -> HeadResult:
    none = np.empty(0, np.float32)
    return HeadResult(faults, dims, np.zeros(tokens, bool), 0, settings.entries(tokens), none, (), None, None)


def _check(q: F16, k: F16, v: F16, v_mean: F32, settings: HeadSettings) -> None:
    for name, array, dtype, shape in (
        ("q", q, np.float16, (len(q), settings.dim)),
        ("k", k, np.float16, (len(k), settings.dim)),
        ("v", v, np.float16, (len(k), settings.dim)),
        ("v_mean", v_mean, np.float32, (settings.dim,)),
    ):
        if array.dtype != dtype:
            raise FormatError(f"{name} must be {np.dtype(dtype)}, not {array.dtype}")
        if array.shape != shape or 0 in shape:
            raise ShapeError(f"{name} must have the shape {shape}, none of it zero, not {array.shape}")
    if not 1 <= len(q) <= _GROUP_MAX:
        raise ShapeError(f"q must have 1 to {_GROUP_MAX} heads, not {len(q)}")
    if settings.reference and len(settings.reference) != len(q):
        raise ShapeError(f"reference must have {len(q)} elements, one a head of q, not {len(settings.reference)}")
