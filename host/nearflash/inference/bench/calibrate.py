"""Channels and mass for every KV head of a model: as many bytes where they mend much, few where they do not.

    python -m nearflash.inference.bench.calibrate MODEL [--weight W]

On texts with even numbers, dense attention runs, and beside it every head is approximated with each of some channels r
and masses tau. The error of a head is |W_o (out - dense)|^2 over the mean square of the residual stream that it is
added to; its cost the share of dense attention's bytes that index and chosen groups are. Each head takes the (r, tau)
with the least error + W · cost: one W for all heads is what spends a given total best. Writes the file that
`nearflash.inference.calibrated` reads.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearflash.abi.attend.pages import IndexFormat
from nearflash.inference.bench.subjects import DOCLM, SUBJECTS, held_out, model_folder, subject
from nearflash.inference.bench.window import FlashUse, HeadWindow, Prefix
from nearflash.inference.calibrated import write_calibrated
from nearflash.inference.policy import AttentionMode, AttentionPolicy
from nearflash.inference.sparse import sparse_attention
from nearflash.inference.sparse.attention import approximate_logits, attend_mixed, choose_tokens, scan_of
from nearflash.storage.kv import KvLayout

__all__ = ["Calibration", "main"]

_TEXTS = (0, 16, 8, 24)
_MASSES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_CHANNELS = (6, 8, 12, 16, 24, 32, 48)
_LAYOUTS = {name: KvLayout(32 if name != DOCLM else 16, False, 512, IndexFormat.INT8, 4096) for name in SUBJECTS}
_BASE = AttentionPolicy(AttentionMode.SPARF_PAGE, budget=0.4, local=32)
_WINDOW, _STEP = 256, 32


class Calibration:
    """Errors and costs of every (layer, KV head, r, tau), from windows that `attend` was given."""

    def __init__(self, model: Any, layout: KvLayout, norms: list[float]) -> None:
        self._layers, self._layout, self._norms = model.model.layers, layout, norms
        self._tables: dict[tuple[int, int], list[NDArray[np.float64]]] = {}

    def attend(self, given: HeadWindow) -> tuple[Tensor, FlashUse]:
        """Dense attention; at some positions all approximations beside it."""
        dense = sparse_attention(given.q, given.k, given.v, given.tokens, AttentionPolicy(), self._layout).out
        here = slice(_STEP // 4, None, _STEP)
        q, exact, tokens, k, v = given.q[:, here], dense[:, here], given.tokens[here], given.k.half(), given.v.half()
        valid = torch.arange(k.shape[1]) < tokens.unsqueeze(-1)
        width = q.shape[-1] * q.shape[-2]
        output = self._layers[given.layer].self_attn.o_proj.weight[:, given.head * width : (given.head + 1) * width]
        table = np.zeros((2, len(_CHANNELS), len(_MASSES)))
        for row, channels in enumerate(_CHANNELS):
            policies = [replace(_BASE, channels=channels, mass=mass) for mass in _MASSES]
            scans = [scan for policy in policies if (scan := scan_of(policy, q.shape[-1], self._layout))]
            _, logits = approximate_logits(q, k, tokens, scans[0], given.scaling)
            probabilities = logits.softmax(dim=-1)
            for column, (policy, scan) in enumerate(zip(policies, scans, strict=True)):
                budget = torch.tensor([policy.numbers(int(t), q.shape[-1], self._layout).budget for t in tokens])
                chosen = choose_tokens(logits, probabilities, tokens, budget, scan) & valid
                out = attend_mixed(q, k, v, probabilities, chosen, tokens, given.scaling)
                error = ((out - exact)[0].flatten(1) @ output.T).square().sum(dim=-1).mean() / self._norms[given.layer]
                table[:, row, column] = float(error), float((chosen.sum(dim=-1) / tokens).mean())
        row_bytes = self._layout.index_layout(q.shape[-1]).stride_bytes / self._layout.block_tokens
        table[1] += np.array(_CHANNELS)[:, None] * row_bytes / (4 * q.shape[-1])
        self._tables.setdefault((given.layer, given.head), []).append(table)
        return dense, FlashUse()

    def policy(self, weight: float) -> tuple[AttentionPolicy, float, float]:
        """The policy for a weight of cost; its cost, a mean over heads, and its error, their sum."""
        heads: dict[int | tuple[int, int], AttentionPolicy] = {}
        total = np.zeros(2)
        for place, tables in self._tables.items():
            error, cost = np.mean(tables, axis=0)
            r, m = np.unravel_index(np.argmin(error + weight * cost), error.shape)
            heads[place] = replace(_BASE, channels=_CHANNELS[r], mass=_MASSES[m])
            total += error[r, m], cost[r, m]
        return replace(_BASE, overrides=heads), float(total[1]) / len(heads), float(total[0])


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Calibrate one model and write its file."""
    parser = argparse.ArgumentParser("calibrate", description="Channels and mass for every KV head of a model.")
    parser.add_argument("model", choices=sorted(SUBJECTS))
    parser.add_argument("--weight", type=float, default=2e-3, help="error that a head's dense bytes are worth")
    arguments = parser.parse_args(argv)
    folder = model_folder()
    if folder is None:
        parser.error("NEARFLASH_MODELS must name the folder with the texts")
    model, tokenizer = subject(arguments.model, folder)
    layout = _LAYOUTS[arguments.model]
    texts = list(held_out(arguments.model, tokenizer, folder, list(_TEXTS)))
    states = model(texts[0][None, :512], output_hidden_states=True).hidden_states
    calibration = Calibration(model, layout, [float(state[0, 64:].square().sum(-1).mean()) for state in states])
    for ids in texts:
        Prefix(model, ids[:-_WINDOW]).logits(ids[-_WINDOW:], calibration.attend)
    policy, cost, error = calibration.policy(arguments.weight)
    made_by = f"nearflash.inference.bench.calibrate {arguments.model} --weight {arguments.weight}"
    path = write_calibrated(arguments.model, policy, layout, made_by)
    print(f"{path}: {cost:.3f} of dense bytes (index of whole blocks, chosen groups), error {error:.4f}")


if __name__ == "__main__":
    main()
