"""The baselines' choices against plain loops."""

import torch

from nearflash.inference.sparse.baselines import heavy_hitters, local_window, quest_pages


def test_a_window_holds_sinks_and_the_last_tokens():
    mask = local_window(torch.tensor([9, 10]), 10, torch.tensor([4, 5]), sinks=2)
    assert [row.nonzero().flatten().tolist() for row in mask] == [[0, 1, 7, 8], [0, 1, 7, 8, 9]]


def test_quest_takes_the_pages_that_may_hold_the_largest_scores(make_heads):
    q, k, _, seen = make_heads(tokens=90)
    mask = quest_pages(q, k, seen, torch.tensor([3, 3, 4]), 8)
    for head in range(len(q)):
        for place, tokens in enumerate(seen.tolist()):
            bounds = []
            for start in range(0, (tokens - 1) // 8 * 8, 8):
                own = k[head, start : start + 8]
                ends = torch.stack([q[head, place, :, None] * own.amin(0), q[head, place, :, None] * own.amax(0)])
                bounds.append(float(ends.amax(0).sum()))
            current = (tokens - 1) // 8
            best = sorted(range(current), key=lambda page: -bounds[page])[: (3, 3, 4)[place] - 1]
            wanted = {t for page in (*best, current) for t in range(page * 8, min(tokens, page * 8 + 8))}
            assert set(mask[head, place].nonzero().flatten().tolist()) == wanted


def test_heavy_hitters_count_what_was_attended_to_before():
    history = torch.tensor([[0.0, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    probabilities = torch.zeros(1, 2, 1, 8)
    probabilities[0, 0, 0, 2] = 1.5  # counts for the second position only
    mask = heavy_hitters(history, probabilities, torch.tensor([7, 8]), torch.tensor([4, 4]))
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == [[1, 3, 5, 6], [1, 2, 6, 7]]
