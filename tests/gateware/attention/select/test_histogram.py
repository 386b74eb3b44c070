"""Sums of random and of repeated bins, and the bins before each addition."""

import random

from nearflash.gateware.attention.select.histogram import Histogram


def test_adds_also_to_the_bins_just_met(clocked):
    rng = random.Random(1)
    rows = [{"bin": b, "clear": 1, "add": 0} for b in range(4)]
    rows += [{"bin": rng.randrange(4), "clear": 0, "add": rng.random() < 0.8, "amount": {"n": rng.randrange(8)}}
             for _ in range(300)]  # fmt: skip
    idle = [{"add": 0, "clear": 0}] * Histogram.LATENCY
    seen = clocked(Histogram(2, {"n": 12}, {"n": 3}), rows + idle, ["o"])[Histogram.LATENCY :]
    sums = [0] * 4
    for row, (before,) in list(zip(rows, seen, strict=True))[4:]:
        assert before.n == sums[row["bin"]]
        sums[row["bin"]] += row["amount"]["n"] * row["add"]
