"""Rows of 4 bits, pruning and sparse attention together."""

import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.bench.inference.settings import by_policy
from nearflash.bench.inference.together import measure_together, round_cache
from nearflash.inference.calibration.window import FlashUse, HeadWindow
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

LAYOUT = KvLayout(16, True, 128, IndexFormat.INT4, 4096)
SPARSE = AttentionPolicy("sparf-page", score_dims=4, top_k=0.25, local_window=8, keep_tail=True)


def test_every_combination_has_a_row(tiny_model):
    generator = torch.Generator().manual_seed(6)
    texts = torch.randint(97, (2, 169), generator=generator)
    settings = [by_policy(policy, LAYOUT, 16) for policy in (AttentionPolicy(), SPARSE)]
    before = {name: weight.clone() for name, weight in tiny_model.state_dict().items()}
    others = torch.randint(97, (4, 32), generator=generator)
    rows = {row["setting"]: row for row in measure_together("tiny", tiny_model, settings, texts, others, 20)}
    assert all(torch.equal(weight, tiny_model.state_dict()[name]) for name, weight in before.items())
    assert len(rows) == 16 and {"FP16", "4-bit", "4-bit-S", "4-bit-P-S", "W4-KV16", "W16-KV4"} <= set(rows)
    assert rows["FP16"]["delta_nll_percent"] == 0 and rows["FP16"]["weights_fraction"] == 1
    assert all(row["delta_nll_percent"] != 0 for name, row in rows.items() if name != "FP16")
    assert rows["4-bit-P"]["weights_fraction"] < rows["FP16-P"]["weights_fraction"] < 1
    assert rows["4-bit"]["weights_fraction"] < 0.35 and rows["4-bit"]["weight_sparsity"] == 0
    wider = 36 / 32  # a group of 64 codes holds 16 elements here
    assert rows["4-bit"]["memory_fraction"] == pytest.approx(wider * rows["FP16"]["memory_fraction"])
    assert rows["FP16-S"]["flash_fraction"] < rows["FP16"]["flash_fraction"]


def test_rounded_keys_and_values_are_attended_to_and_counted():
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(1, 2, 1, 64, generator=generator), *torch.randn(2, 1, 5, 64, generator=generator)
    given = HeadWindow(0, 0, q, k, v, torch.tensor([4, 5]), 1.0, None)

    def attend(head):
        return torch.stack([head.k, head.v]), FlashUse(index=0.1, gather=1.0, memory=0.5)

    exact, use = round_cache(attend, 16)(given)
    assert torch.equal(exact, torch.stack([k, v])) and use.gather == 1
    rounded, use = round_cache(attend, 4)(given)
    spread = exact.amax(dim=-1) - exact.amin(dim=-1)
    assert 0 < (rounded - exact).abs().max() <= 0.51 * spread.max() / 15 + 1e-2
    assert (use.index, use.gather, use.memory) == pytest.approx((0.1, 36 / 128, 18 / 128))
