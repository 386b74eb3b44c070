"""Bench `attend`, flash bytes: `sparf` against `sparf-page` at equal error, on what a language model really attends to.

A head's error is |out - dense| / |dense| (Euclidean, over a query head's output); `output_error` is its mean over all
layers, heads and texts. `sparf` has a fixed setting (k = S/16 tokens, r = d/8, fp16 index, m = 2); for `sparf-page`
(int4 index, r = 32) top_k is searched: of all candidates whose mean error on one half of the texts is at least
10 % below sparf's, the one with the fewest bytes; the 10 % are for what the other half may differ. Rows are of the
other half, from the bit-exact model: `error_to_sparf` compares the errors there.

`sparf` is counted twice: reading whole pages, as it was published, and reading codewords, as this kernel does for any
mode. Bytes are data bytes (without ECC and CRC), the unindexed suffix included. A row with a `skipped` key measured
nothing.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat
from nearflash.inference.sparse.attention import Scan, approximate_logits, attend_mixed, choose_tokens
from nearflash.model.attention.head import attend_repeated
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.traffic import HeadTraffic, traffic
from nearflash.verify.bench.recording import RecordedHeads, record

__all__ = ["MODELS_VARIABLE", "TextHeads", "flash_rows", "measure", "relative_error"]

MODELS_VARIABLE = "NEARFLASH_MODELS"
"""Environment variable: folder with the models and eval_tokens.npy (texts of 4,096 token ids)."""
_TOKENS = (4096, 3584)
"""The first has no unindexed suffix, the second half a block of it."""
_BLOCK_TOKENS = 1024
_TOP_P = int(0.95 * 65536)
_PAGES_IN = (32, 24, 20, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2)
"""Candidates: one page in so many."""
_MARGIN = 0.9
"""Of sparf's error, what a candidate may have where top_k is searched."""


@dataclass(frozen=True)
class _Measured:
    """One setting; means over heads and texts."""

    settings: HeadSettings
    error: float
    lost: float
    """Dense attention's probability on the tokens that are not read."""
    traffic: tuple[HeadTraffic, ...]

    def bytes_asked(self, whole_pages: bool) -> float:
        """Data bytes asked for, a head."""
        if not whole_pages:
            return float(np.mean([t.all.requested_bytes for t in self.traffic]))
        pages = [t.index.requests + t.suffix.requests + t.gather.requests * self.settings.token_layout.pages
                 for t in self.traffic]  # fmt: skip
        return float(np.mean(pages)) * self.settings.page_bytes


def flash_rows(folder: Path | None = None, model: str = "doclm-30m", texts: int = 12) -> Iterator[dict[str, Any]]:
    """Rows of `model` in `folder` (default: what the environment variable names) on `texts` held-out texts."""
    named = os.environ.get(MODELS_VARIABLE)
    folder = folder or (Path(named) if named else None)
    if folder is None or not (folder / model / "config.json").is_file():
        yield {"mode": "sparf-page", "model": model, "skipped": f"set {MODELS_VARIABLE} to the folder that has {model}"}
        return
    held_out = np.load(folder / "eval_tokens.npy").reshape(-1, max(_TOKENS))
    step = max(2, len(held_out) // (texts // 2))
    search, report = (held_out[first::step][: texts // 2] for first in (0, step // 2))
    chosen = np.concatenate([search, report])
    yield from measure(record(folder / model, chosen, _TOKENS), model, _TOKENS, len(search))


def measure(
    recorded: Iterable[RecordedHeads], model: str, tokens: tuple[int, ...], search: int
) -> Iterator[dict[str, Any]]:
    """Rows for each S of `tokens`; top_k is searched at the first S on the first `search` texts."""
    remaining = iter(recorded)
    pages_in = _search([text.at(0, tokens[0]) for text in islice(remaining, search)], tokens[0])
    texts = list(remaining)
    for position, count in enumerate(tokens):
        heads = [text.at(position, count) for text in texts]
        dim = heads[0].q.shape[-1]
        layouts = (_sparf(dim, count, False), _sparf(dim, count, True))
        rows = [
            _row("sparf", model, count, measured, whole)
            for measured in _exact(heads, layouts)
            for whole in (True, False)
        ]  # fmt: skip
        (page,) = _exact(heads, (_sparf_page(dim, count, pages_in),))
        own = _row("sparf-page", model, count, page, False)
        for reads in ("pages", "codewords"):
            asked = min(row["flash_bytes_asked_per_head"] for row in rows if row["reads"] == reads)
            own["ratio" if reads == "pages" else "ratio_codewords"] = asked / own["flash_bytes_asked_per_head"]
        own["error_to_sparf"] = own["output_error"] / rows[0]["output_error"]
        own["of"] = "bytes asked for: the better of sparf's layouts, whole pages (or codewords) / this row"
        yield from (*rows, own)


def _sparf(dim: int, tokens: int, interleaved: bool) -> HeadSettings:
    top_k = max(1, tokens // 16)
    return HeadSettings(
        Mode(0), dim, LOG2E / dim**0.5, score_dims=dim // 8, top_k=top_k, local_window=max(1, top_k // 4),
        group_tokens=8 if interleaved else 16, interleaved=interleaved, block_tokens=_BLOCK_TOKENS,
    )  # fmt: skip


def _sparf_page(dim: int, tokens: int, pages_in: int) -> HeadSettings:
    """At most one page in `pages_in`."""
    return HeadSettings(
        Mode.PAGE | Mode.PROBABILITY, dim, LOG2E / dim**0.5, score_dims=32, top_p=_TOP_P, local_window=64,
        group_tokens=8, interleaved=True, block_tokens=_BLOCK_TOKENS, index_format=IndexFormat.INT4,
        top_k=max(1, tokens // 8 // pages_in),
    )  # fmt: skip


def _search(texts: list[RecordedHeads], tokens: int) -> int:
    """The smallest top_k (the largest number of pages of which one is read) that is more accurate than sparf."""
    errors = np.zeros(len(_PAGES_IN))
    limit = 0.0
    for text in texts:
        heads = TextHeads(text)
        dim = text.q.shape[-1]
        limit += heads.errors([_sparf(dim, tokens, True)])[0]
        errors += heads.errors([_sparf_page(dim, tokens, pages_in) for pages_in in _PAGES_IN])
    good = [pages_in for pages_in, error in zip(_PAGES_IN, errors, strict=True) if error <= _MARGIN * limit]
    return max(good, default=_PAGES_IN[-1])


def relative_error(out: Tensor, exact: Tensor) -> Tensor:
    """|out - exact| / |exact|, Euclidean, over the last axis."""
    return (out - exact).norm(dim=-1) / exact.norm(dim=-1)


class TextHeads:
    """The heads of one text at one position in torch: dense attention, and what a setting makes of it, for searches.

    `dense` is (heads, g, d), `probabilities` (heads, g, S).
    """

    def __init__(self, text: RecordedHeads) -> None:
        self._q = torch.from_numpy(text.q[0]).float().unsqueeze(1)
        self._k, self._v = torch.from_numpy(text.k), torch.from_numpy(text.v)
        self._scaling = self._q.shape[-1] ** -0.5
        self._tokens = torch.tensor([self._k.shape[1]])
        scores = self._q.squeeze(1) @ self._k.float().transpose(1, 2) * self._scaling
        self.probabilities = scores.softmax(dim=-1)
        self.dense = self.probabilities @ self._v.float()

    def attend(self, candidates: Sequence[HeadSettings]) -> Iterator[tuple[Tensor, Tensor]]:
        """Output (heads, g, d) and chosen tokens (heads, S) of candidates that differ in top_k."""
        first = candidates[0]
        scan = Scan(
            first.score_dims, first.local_window, first.top_p, bool(first.mode & Mode.PROBABILITY),
            first.entry_tokens, first.block_tokens, first.index_format,
        )  # fmt: skip
        _, logits = approximate_logits(self._q, self._k, self._tokens, scan, self._scaling)
        probabilities = logits.softmax(dim=-1)
        for settings in candidates:
            chosen = choose_tokens(logits, probabilities, self._tokens, torch.tensor([settings.top_k]), scan)
            out = attend_mixed(self._q, self._k, self._v, probabilities, chosen, self._tokens, self._scaling)
            yield out.squeeze(1), chosen.squeeze(1)

    def errors(self, candidates: Sequence[HeadSettings]) -> NDArray[np.float64]:
        """Mean errors of candidates that differ in top_k."""
        return np.array([float(relative_error(out, self.dense).mean()) for out, _ in self.attend(candidates)])


def _exact(texts: list[RecordedHeads], layouts: tuple[HeadSettings, ...]) -> list[_Measured]:
    """The bit-exact model on every head of every text; the settings differ in what changes no number."""
    errors, lost, reads = [], [], []
    for text in texts:
        heads = TextHeads(text)
        for head, (q, k, v) in enumerate(zip(text.q[0], text.k, text.v, strict=True)):
            mean = v.astype(np.float64).mean(axis=0).astype(np.float32)
            result = attend_repeated(q, k, v, mean, layouts[0])
            assert result.out is not None, result.faults
            errors.append(float(relative_error(torch.from_numpy(result.out).float(), heads.dense[head]).mean()))
            unread = torch.from_numpy(~result.chosen)
            lost.append(float((heads.probabilities[head] * unread).sum(dim=-1).mean()))
            reads.append([traffic(settings, result.score_dims, result.chosen) for settings in layouts])
    error, missing = float(np.mean(errors)), float(np.mean(lost))
    return [
        _Measured(settings, error, missing, own)
        for settings, own in zip(layouts, zip(*reads, strict=True), strict=True)
    ]


def _row(mode: str, model: str, tokens: int, measured: _Measured, whole: bool) -> dict[str, Any]:
    settings = measured.settings
    return {
        "mode": mode,
        "model": model,
        "tokens": tokens,
        "layout": "interleaved" if settings.interleaved else "separate",
        "reads": "pages" if whole else "codewords",
        "index_bits": settings.index_format.bits,
        "score_dims": settings.score_dims,
        "top_k": settings.top_k,
        "top_p": settings.top_p / 65536,
        "flash_bytes_asked_per_head": measured.bytes_asked(whole),
        "flash_bytes_used_per_head": float(np.mean([t.all.used_bytes for t in measured.traffic])),
        "flash_bytes_suffix_per_head": float(np.mean([t.suffix.requested_bytes for t in measured.traffic])),
        "output_error": measured.error,
        "lost_probability": measured.lost,
        "heads": len(measured.traffic),
        "unit": "data bytes",
    }
