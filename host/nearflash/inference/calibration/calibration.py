"""score_dims and top_p for every KV head of a model: many bytes where they help much, few where they do not.

On texts, dense attention runs. For each head and position, g is the gradient of the log
probability of next tokens, sampled as the model predicts them, with respect to the head's output. An output that is off
by e then costs (g·e)^2 / 2 nats: to second order its part in the divergence from the dense prediction (the Fisher
information). Beside it every head is approximated with each of some r (score_dims) and tau (top_p), which gives e, and
the share of dense attention's bytes that index and chosen groups take of flash. Each head gets the (r, tau) with the
least divergence + W · share: one W for all heads is what spends a given total, F, best.
"""

import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from nearflash.abi.errors import CommandError, StateError
from nearflash.inference.calibration.window import FlashUse, HeadWindow, Prefix
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.sparse.attention import approximate_logits, choose_tokens, scan_of
from nearflash.storage.kv import KvLayout
from nearflash.support.files import open_regular, replace_file

__all__ = ["WINDOW", "Calibration", "score_dims_of"]

_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
_SCORE_DIMS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
"""Shares of d."""
_BASE = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=1.0, local_window=64, keep_tail=True)
WINDOW = 256
"""Tokens at the end of a text whose attention is looked at."""
_STEP, _DRAWS = 8, 3
_HALVINGS = 40
_Tables = dict[tuple[int, int], NDArray[np.float64]]
_LEAST = 1e-30
"""Of a sum of weights: all chosen ones may be too small for fp32."""


@dataclass(frozen=True)
class _Seen:
    """A head of a window, and what dense attention makes of it."""

    given: HeadWindow
    out: Tensor
    """(P, g, d)."""
    probe: Tensor
    """Zeros added to `out`: their gradient is its."""


def score_dims_of(dim: int) -> tuple[int, ...]:
    """The r that each head is tried with."""
    return tuple(sorted({max(round(share * dim), 1) for share in _SCORE_DIMS}))


class Calibration:
    """Divergence and share of flash bytes of every (layer, KV head, r, tau), means over what was added.

    Layers are numbered as on flash: those with full attention. Raises CommandError without a text.
    """

    def __init__(self, layout: KvLayout, score_dims: tuple[int, ...]) -> None:
        self._layout, self._score_dims = layout, score_dims
        self._seen: list[_Seen] = []
        self._tables: dict[tuple[int, int], list[NDArray[np.float64]]] = {}

    @property
    def windows(self) -> int:
        """How many were added."""
        return min(map(len, self._tables.values()), default=0)

    def save(self, path: Path, key: str) -> None:
        """Keep what was found, to go on from, durably; `key` says what it was found for. Raises OSError."""
        places = sorted(self._tables)
        tables = np.array([self._tables[key] for key in places])
        with replace_file(path) as out:
            np.savez(out, key=np.array(key), places=np.array(places), tables=tables)

    def resume(self, path: Path, key: str) -> bool:
        """Go on from what `save` kept; False where there is none of this key. Raises StateError for a damaged file."""
        if not path.exists():
            return False
        try:
            with os.fdopen(open_regular(path), "rb") as source, np.load(source, allow_pickle=False) as kept:
                if str(kept["key"]) != key:
                    return False
                places, tables = kept["places"].tolist(), kept["tables"]
                expected = (len(places), 2, len(self._score_dims), len(_TOP_P))
                if (tables.shape[0], *tables.shape[2:]) != expected or not np.isfinite(tables).all():
                    raise ValueError(f"tables of {tables.shape}")
                self._tables = {(layer, head): list(row) for (layer, head), row in zip(places, tables, strict=True)}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise StateError(f"{path} must be what an interrupted calibration kept ({error}); remove it") from error
        return True

    def add(self, prefix: Prefix, window: Tensor, seed: int = 0) -> None:
        """Add the window of a text; the model's parameters must not require gradients."""
        self._seen.clear()
        predicted = prefix.logits(window, self._attend, gradients=True)[0].log_softmax(dim=-1)
        draw, probes, divergences = torch.Generator().manual_seed(seed), [seen.probe for seen in self._seen], []
        for _ in range(_DRAWS):
            tokens = torch.multinomial(predicted.detach().exp(), 1, generator=draw)
            divergences.append(torch.autograd.grad(predicted.gather(1, tokens).sum(), probes, retain_graph=True))
        for seen, *gradients in zip(self._seen, *divergences, strict=True):
            table = self._table(seen, torch.stack(gradients)[:, 1::_STEP].flatten(2))
            self._tables.setdefault((seen.given.layer, seen.given.head), []).append(table)

    def policy(self, fraction: float) -> tuple[AttentionPolicy, float, float]:
        """The policy that takes at most this share of flash bytes; the share, a mean over heads, and the divergence."""
        if not self._tables:
            raise CommandError("texts must be at least one, not none")
        means = {key: np.mean(tables, axis=0) for key, tables in self._tables.items()}
        least, most = -12.0, 3.0  # log10 of W
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            _, (_, share) = _best(means, 10**middle)
            least, most = (middle, most) if share > fraction else (least, middle)
        best, (divergence, share) = _best(means, 10**most)
        heads: dict[int | tuple[int, int], AttentionPolicy] = {
            key: replace(_BASE, score_dims=self._score_dims[r], top_p=_TOP_P[m]) for key, (r, m) in best.items()
        }
        return replace(_BASE, overrides=heads), share, divergence

    def _attend(self, given: HeadWindow) -> tuple[Tensor, FlashUse]:
        """Dense attention with a probe."""
        k, v = (x.half().to(given.q.dtype)[:, None] for x in (given.k, given.v))
        visible = torch.arange(k.shape[2]) < given.tokens.unsqueeze(-1)
        q = given.q.transpose(1, 2)
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, visible, scale=given.scaling).transpose(1, 2)
        probe = torch.zeros_like(out[0], requires_grad=True)
        detached = replace(given, **{name: getattr(given, name).detach() for name in ("q", "k", "v")})
        self._seen.append(_Seen(detached, out[0].detach(), probe))
        return out + probe, FlashUse()

    @torch.no_grad()
    def _table(self, seen: _Seen, gradients: Tensor) -> NDArray[np.float64]:
        """(2, r, tau): divergence and share of flash, from gradients (draws, positions, g·d) at some positions."""
        given, here, group_tokens = seen.given, slice(1, None, _STEP), self._layout.group_tokens
        q, exact, tokens, k = given.q[:, here], seen.out[here], given.tokens[here], given.k.half()
        groups = _GroupSums(q[0], k[0], given.v[0].half(), tokens, group_tokens, given.scaling)
        covered = (tokens // self._layout.block_tokens * self._layout.block_tokens).unsqueeze(-1)
        on_flash = torch.arange(groups.count) * group_tokens < covered
        row_share = self._layout.index_layout(q.shape[-1]).stride_bytes / self._layout.block_tokens / (4 * q.shape[-1])
        table = np.zeros((2, len(self._score_dims), len(_TOP_P)))
        for row, score_dims in enumerate(self._score_dims):
            policies = [replace(_BASE, score_dims=score_dims, top_p=top_p) for top_p in _TOP_P]
            scans = [scan for policy in policies if (scan := scan_of(policy, q.shape[-1], self._layout))]
            logits = approximate_logits(q, k, tokens, scans[0], given.scaling)[1]
            probabilities = logits.softmax(dim=-1)
            index = score_dims * row_share * float((covered[:, 0] / tokens).mean())
            for column, scan in enumerate(scans):
                every = torch.full_like(tokens, groups.count)
                chosen = choose_tokens(logits, probabilities, tokens, every, scan)[0, :, ::group_tokens]
                error = groups.attend(chosen, probabilities[0]) - exact
                table[0, row, column] = float((gradients * error.flatten(1)).sum(dim=-1).square().mean()) / 2
                share = ((chosen & on_flash).sum(dim=-1) * group_tokens / tokens).mean()
                table[1, row, column] = index + float(share)
        return table


def _best(tables: _Tables, weight: float) -> tuple[dict[tuple[int, int], tuple[int, int]], tuple[float, float]]:
    """Places of r and tau for every head, and what they come to: divergence, the sum over heads; share, their mean."""
    best = {head: divmod(int((t[0] + weight * t[1]).argmin()), t.shape[2]) for head, t in tables.items()}
    divergence, share = np.sum([tables[head][:, r, m] for head, (r, m) in best.items()], axis=0)
    return best, (float(divergence), float(share) / len(best))


class _GroupSums:
    """Attention to any choice of KV page groups of one head, from sums over each group."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, each: int, scaling: float) -> None:
        hidden = torch.arange(len(k)) >= tokens.unsqueeze(-1)
        scores = (q.flatten(0, 1) @ k.float().T * scaling).unflatten(0, q.shape[:2])
        weights = (scores.masked_fill_(hidden[:, None], -torch.inf) - scores.amax(dim=-1, keepdim=True)).exp()
        self._space = -len(k) % each
        self._each, self.count = each, (len(k) + self._space) // each
        parts, values = self._group(weights), pad(v.float(), (0, 0, 0, self._space)).unflatten(0, (-1, each))
        self._weights, self._values = parts.sum(dim=-1), torch.einsum("pgen,end->pged", parts, values)
        self._mean = (v.double().cumsum(dim=0)[tokens - 1] / tokens.unsqueeze(-1)).float().unsqueeze(1)

    def attend(self, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """(P, g, d) for groups chosen (P, groups), with approximate probabilities (P, g, S)."""
        taken = chosen.float()
        alpha = torch.einsum("pge,pe->pg", self._group(probabilities).sum(dim=-1), taken).unsqueeze(-1)
        sums = torch.einsum("pge,pe->pg", self._weights, taken).unsqueeze(-1).clamp(min=_LEAST)
        return alpha * torch.einsum("pged,pe->pgd", self._values, taken) / sums + (1 - alpha) * self._mean

    def _group(self, values: Tensor) -> Tensor:
        return pad(values, (0, self._space)).unflatten(-1, (-1, self._each))
