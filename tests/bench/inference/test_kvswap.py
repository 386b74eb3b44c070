"""KVSwap's rule against a loop over groups, and its bytes."""

import pytest
import torch

from nearflash.bench.inference.kvswap import GROUP_TOKENS, find_projections, kvswap, select_groups
from nearflash.inference.calibration.window import HeadWindow, Prefix


@pytest.fixture
def given():
    """Two KV heads of two query heads each, three positions at the end of 19 tokens."""
    generator = torch.Generator().manual_seed(3)
    keys, predicted = torch.randn(2, 19, 8, generator=generator), torch.randn(4, 3, 8, generator=generator)
    q, v = torch.randn(1, 3, 2, 8, generator=generator), torch.randn(1, 19, 8, generator=generator)
    return HeadWindow(1, 0, q, keys[:1], v, torch.tensor([17, 18, 19]), 0.3, None, keys, predicted)


def test_groups_are_those_of_the_largest_mean_score(given):
    projection = torch.randn(16, 3, generator=torch.Generator().manual_seed(4))
    chosen = select_groups(given, projection, torch.tensor([8, 9, 12]))
    for row, (seen, count) in enumerate(((17, 2), (18, 2), (19, 3))):
        scores = {}
        for group in range((seen - 1) // GROUP_TOKENS):
            every = []
            for token in range(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS):
                index = given.keys[:, token].reshape(-1) @ projection
                parts = [given.predicted[head, row] @ projection.view(2, 8, 3)[head // 2] for head in range(4)]
                every.append(float(sum(part @ index for part in parts)))
            scores[group] = max(every)
        best = sorted(scores, key=scores.get, reverse=True)[:count]
        tokens = {4 * group + place for group in best for place in range(4)} | set(range((seen - 1) // 4 * 4, seen))
        assert set(chosen[row].nonzero()[:, 0].tolist()) == tokens


def test_the_first_layer_reads_all(given):
    without = HeadWindow(**{**given.__dict__, "predicted": None})
    assert select_groups(without, torch.zeros(16, 2), torch.tensor([4, 4, 4])).sum(dim=-1).tolist() == [17, 18, 19]


def test_projections_hold_keys_of_their_rank(tiny_model):
    texts = torch.randint(97, (3, 60), generator=torch.Generator().manual_seed(5))
    assert [each.shape for each in find_projections(tiny_model, texts).values()] == [(32, 4)] * 2
    whole = find_projections(tiny_model, texts, rank=32)[1]
    torch.testing.assert_close(whole @ whole.T, torch.eye(32), atol=1e-5, rtol=0)
    half, keys = find_projections(tiny_model, texts, rank=16)[1], []
    with torch.no_grad():
        for ids in texts:
            cache = tiny_model(ids[None], use_cache=True).past_key_values
            keys.append(cache.layers[1].keys[0].transpose(0, 1).flatten(1))
    keys = torch.cat(keys)
    least = torch.linalg.svdvals(keys)[16:].square().sum()
    assert (keys - keys @ half @ half.T).square().sum() == pytest.approx(float(least), rel=1e-3)


def test_all_tokens_are_dense_and_bytes_are_counted(tiny_model):
    ids = torch.randint(97, (150,), generator=torch.Generator().manual_seed(6))
    projections, prefix = find_projections(tiny_model, ids[None, :100]), Prefix(tiny_model, ids[:-6], history=False)
    with torch.no_grad():
        own = tiny_model(ids[None]).logits[0, -6:]
    every = kvswap(projections, 1.1)
    logits, use = prefix.logits(ids[-6:], every.attend, predicts=every.predicts)
    torch.testing.assert_close(logits, own, atol=1e-4, rtol=0)
    index = 4 / (2 * 32) / 2  # of one of two layers
    assert use.gather + use.memory == pytest.approx(1 + index, rel=0.02)
    less = kvswap(projections, 0.25)
    changed, use = prefix.logits(ids[-6:], less.attend, predicts=True)
    assert (changed - logits).abs().max() > 1e-4
    assert use.gather == pytest.approx((1 + 0.25) / 2, abs=0.03)  # the first layer's, and the second's
