"""Calibration: what it predicts is what happens, and a total is spent."""

import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.bench.inference.settings import by_policy
from nearflash.inference.calibration.calibration import Calibration
from nearflash.inference.calibration.window import Prefix
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

LAYOUT = KvLayout(16, True, 256, IndexFormat.FP16, 4096)


@pytest.fixture
def calibration(tiny_model):
    """With q and K of some weight: at random they are next to nothing, and all tokens weigh the same."""
    tiny_model.requires_grad_(False)
    for layer in tiny_model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight *= 8
        layer.self_attn.o_proj.weight *= 20
    made = Calibration(LAYOUT, (4, 16))
    prefix = Prefix(tiny_model, torch.randint(97, (530,), generator=torch.Generator().manual_seed(1)), history=False)
    window = torch.randint(97, (64,), generator=torch.Generator().manual_seed(2))
    made.add(prefix, window)
    return made, prefix, window


def test_a_total_is_spent_where_it_mends_most(calibration):
    made, _, _ = calibration
    little, much = (made.policy(fraction) for fraction in (0.42, 0.7))
    assert little[1] <= 0.42 < much[1] <= 0.7
    assert little[2] > much[2] >= 0
    assert set(little[0].overrides) == {(layer, head) for layer in range(2) for head in range(2)}


def test_divergence_is_about_what_was_predicted(calibration):
    made, prefix, window = calibration
    dense = prefix.logits(window, by_policy(AttentionPolicy(), LAYOUT, 16).attend)[0].log_softmax(-1)
    for fraction in (0.4, 0.55):
        policy, share, predicted = made.policy(fraction)
        logits, use = prefix.logits(window, by_policy(policy, LAYOUT, 16).attend)
        found = float((dense.exp() * (dense - logits.log_softmax(-1))).sum(-1).mean())
        assert predicted / 4 < found < 4 * predicted
        assert use.all == pytest.approx(share, rel=0.15)
