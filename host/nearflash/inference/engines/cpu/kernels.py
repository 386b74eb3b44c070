"""Attention on the CPU by the loops of attention.cpp, which are built at their first use.

fp16 comes in, fp32 is computed with. Arrays are C-contiguous where nothing else is stated. Letters: H KV heads, g query
heads of a KV head, d head dimension, r dims of the score, S tokens, E entries.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.inference.engines.paged.index_rows import IndexRows
from nearflash.inference.engines.paged.reads import Groups
from nearflash.inference.engines.paged.softmax import AttentionForm
from nearflash.storage.kv import StoredHead
from nearflash.support.native import find_address, load_library

__all__ = ["LOWEST", "Choice", "PageShape", "RunningAttention", "are_finite", "attend_memory", "load_loops"]

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
LOWEST = np.float32(-3.0e38)
"""A logit that is none."""
_I32, _I64, _F32, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Running(ctypes.Structure):
    """`Running` of attention.cpp."""

    _fields_ = (
        *((name, _I64) for name in ("heads", "group", "dim")),
        *((name, _ADDRESS) for name in ("q", "largest", "total", "out")),
        ("softcap", _F32),
    )


class _Memory(ctypes.Structure):
    """`Memory` of attention.cpp."""

    _fields_ = (
        *((name, _I64) for name in ("heads", "group", "dim", "tokens", "between", "stride")),
        *((name, _ADDRESS) for name in ("q", "keys", "values")),
        *((name, _F32) for name in ("scaling", "softcap")),
        *((name, _ADDRESS) for name in ("sinks", "out")),
    )


class _PageGroups(ctypes.Structure):
    """`PageGroups` of attention.cpp."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("kept", "fresh", "late", "places", "numbers", "ends")),
        *((name, _I64) for name in ("early", "elements", "v_from", "stride", "each")),
        ("chosen", _ADDRESS),
        ("tokens", _I64),
    )


class _Suffixes(ctypes.Structure):
    """`Suffixes` of attention.cpp."""

    _fields_ = (
        ("heads", _ADDRESS),
        *((name, _I64) for name in ("tokens", "k_between", "v_between")),
        *((name, _ADDRESS) for name in ("keys", "values", "chosen", "sinks", "alpha", "v_mean")),
    )


class _Index(ctypes.Structure):
    """`Index` of attention.cpp."""

    _fields_ = (
        *((name, _I64) for name in ("heads", "blocks", "lines", "length", "bits", "covered")),
        *((name, _I64) for name in ("suffix_tokens", "suffix_between")),
        *((name, _ADDRESS) for name in ("codes", "factors", "suffix", "rows")),
    )


class _Choice(ctypes.Structure):
    """`Choice` of attention.cpp."""

    _fields_ = (
        *((name, _I64) for name in ("group", "dim", "score_dims", "each", "entries", "window", "top_k", "top_p")),
        ("by_probability", _I32),
        *((name, _F32) for name in ("scaling", "softcap")),
        *((name, _ADDRESS) for name in ("q", "dims", "scores", "counts", "taken", "alpha")),
    )


@cache
def load_loops() -> ctypes.CDLL:
    """The functions of attention.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("attention.cpp"))
    for function in (loops.attend_memory, loops.attend_groups, loops.attend_suffixes, loops.choose_heads):
        function.restype = None
    loops.are_finite.argtypes = [_ADDRESS, _I64]
    return loops


def are_finite(numbers: F16) -> bool:
    """Whether no fp16 number is an infinity or NaN."""
    return bool(load_loops().are_finite(find_address(numbers), numbers.size))


def attend_memory(q: F16, keys: F16, values: F16, tokens: int, form: AttentionForm[F32], out: F32) -> None:
    """Attention of q (H, g, d) to the first `tokens` of K and V (H, T, d), alike, d contiguous, into out (H, g, d)."""
    sinks = None if form.sinks is None else find_address(form.sinks)
    between, stride, _ = (step // keys.itemsize for step in keys.strides)
    memory = _Memory(
        *q.shape, tokens, between, stride, find_address(q), keys.ctypes.data, values.ctypes.data, form.scaling,
        form.softcap or 0.0, sinks, find_address(out),
    )  # fmt: skip
    load_loops().attend_memory(ctypes.byref(memory))


@dataclass(frozen=True)
class PageShape:
    """How a KV page group lies in memory, in elements: V is `v_from` behind K, a token `stride` behind the last."""

    elements: int
    v_from: int
    stride: int
    tokens: int


class RunningAttention:
    """Attentions of q (H, g, d), scaled, over parts of their tokens, one after the other; `finish` ends them."""

    def __init__(self, q: F32, softcap: float | None) -> None:
        self.largest, self.total = np.full(q.shape[:2], LOWEST), np.zeros(q.shape[:2], np.float32)
        self.out = np.zeros(q.shape, np.float32)
        self._q, self._shape = q, q.shape
        arrays = (q, self.largest, self.total, self.out)
        self._record = _Running(*q.shape, *(find_address(array) for array in arrays), softcap or 0.0)

    def attend_groups(self, groups: Groups, shape: PageShape, chosen: Bools | None) -> None:
        """Go on over KV page groups. chosen (H, S): which tokens count; None: all."""
        numbers = [np.ascontiguousarray(array) for array in (groups.places, groups.number, groups.ends)]
        pages = (groups.kept, groups.new, groups.late, *numbers)
        record = _PageGroups(
            *(find_address(array) for array in pages), len(groups.new), shape.elements, shape.v_from, shape.stride,
            shape.tokens,
            *((None, 0) if chosen is None else (find_address(chosen), chosen.shape[1])),
        )  # fmt: skip
        load_loops().attend_groups(ctypes.byref(self._record), ctypes.byref(record))

    def finish(self, stored: StoredHead, heads: Ints, chosen: Bools | None, alpha: F32, sinks: F32 | None) -> F32:
        """End with the tokens of `heads` (H,) in memory; the output (H, g, d).

        Their suffixes' arrays are each head's together. chosen (H, u): which of their tokens count; None: all. alpha
        (H, g): share of the chosen tokens in the softmax over all; the rest is the mean of V. sinks (all heads, g):
        logits without a value; None: none.
        """
        keys, values = stored.suffix_k, stored.suffix_v
        record = _Suffixes(
            find_address(heads), keys.shape[1], keys.strides[0] // 2, values.strides[0] // 2, keys.ctypes.data,
            values.ctypes.data, None if chosen is None else find_address(chosen),
            None if sinks is None else find_address(sinks), find_address(alpha), find_address(stored.v_mean),
        )  # fmt: skip
        load_loops().attend_suffixes(ctypes.byref(self._record), ctypes.byref(record))
        return self.out


@dataclass(frozen=True)
class Choice:
    """How entries of `each` tokens are chosen by their scores.

    Entries that hold one of the last `window` tokens come first, then those with the largest fp16 key, the lower index
    first among equals: `top_k` of them; with top_p (2^-16) as many as hold that share of the keys, all with the last
    key needed, at most `top_k`. A key is a probability, else the largest logits' sum over query heads.
    """

    each: int
    by_probability: bool
    window: int
    top_k: int
    top_p: int

    def choose(
        self, q: F32, dims: Ints, index: IndexRows, rows: Ints, bits: int, suffix: F16, form: AttentionForm[F32],
        room: tuple[F32, NDArray[np.int32]],
    ) -> tuple[Bools, F32]:  # fmt: skip
        """Which entries of heads are taken (H, E), and alpha (H, g), the share that they hold.

        q (H, g, d) is scored over dims (H, r), which are the index's `rows` (H, r); suffix (H, t, d): K of the tokens
        after those of the index, each head's together; room: for scores (g·S,), and 2^16 zeros, which are zeros again
        afterwards.
        """
        (heads, group, dim), (_, blocks, lines, length) = q.shape, index.codes.shape
        covered = blocks * length * 8 // bits
        entries = -(-(covered + suffix.shape[1]) // self.each)
        taken, alpha = np.empty((heads, entries), bool), np.empty((heads, group), np.float32)
        record = _Index(
            heads, blocks, lines, length, bits, covered, suffix.shape[1], suffix.strides[0] // 2,
            find_address(index.codes), find_address(index.factors), suffix.ctypes.data, find_address(rows),
        )  # fmt: skip
        choice = _Choice(
            group, dim, dims.shape[1], self.each, entries, self.window, self.top_k, self.top_p, self.by_probability,
            form.scaling, form.softcap or 0.0, *(find_address(array) for array in (q, dims, *room, taken, alpha)),
        )  # fmt: skip
        load_loops().choose_heads(ctypes.byref(choice), ctypes.byref(record))
        return taken, alpha
