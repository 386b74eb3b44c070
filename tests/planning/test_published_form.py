"""FlexGen's released cost model, written here in the paper's symbols, against the form `released`."""

import pytest

from nearflash.planning.cost import predict
from nearflash.planning.memory import peaks
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.terms import Workload

GB, T = 2**30, 1e12
CTOG, GTOC_CACHE, GTOC_HIDDEN = 12.89 * GB, 0.97 * GB, 4.82 * GB
MM_P, MM_G, BMM_P, BMM_G, CPU = 21.24 * T, 4.3 * T, 9.97 * T, 0.079 * T, 0.0123 * T


class Released:
    """Seconds of one layer of OPT: l layers, hidden h, FFN 4h, block bls, prompt s, n new tokens, shares on tiers."""

    def __init__(self, layers, hidden, s, n, bls, weights, cache, states):
        self.l, self.h, self.s, self.n, self.bls = layers, hidden, s, n, bls
        (self.wg, self.wc), (self.cg, self.cc), (self.hg, self.hc) = weights, cache, states
        self.weights = 8 * hidden**2 + 4 * hidden * 4 * hidden

    def prefill(self):
        s, h, bls = self.s, self.h, self.bls
        states = 2 * s * h * bls * self.hc
        ctog = (self.weights * self.wc + states) / CTOG
        gtoc = 4 * s * h * bls * self.cc / GTOC_CACHE + states / GTOC_HIDDEN
        comp = bls * (8 * s * h**2 + 4 * s * h * 4 * h) / MM_P + 4 * bls * s**2 * h / BMM_P
        return max(ctog, gtoc, comp)

    def decode(self):
        h, bls, context = self.h, self.bls, self.s + self.n / 2
        states = 2 * h * bls * self.hc
        ctog = (self.weights * self.wc + states) / CTOG
        gtoc = states / GTOC_HIDDEN
        gpu = bls * (8 * h**2 + 4 * h * 4 * h) / MM_G + 4 * bls * context * h * self.cg / BMM_G
        cpu = 4 * bls * context * h * self.cc / CPU
        return ctog + max(gtoc, gpu + cpu)


@pytest.mark.parametrize("prompt", [256, 512, 1024])
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "size", "count", "weights", "cache", "states"),
    [
        (48, 7168, 56, 64, 2, (0, 1), (0, 1), (0, 1)),
        (48, 7168, 56, 96, 3, (0, 1), (0, 1), (0, 1)),
        (40, 5120, 40, 128, 1, (0, 1), (1, 0), (1, 0)),
        (64, 9216, 72, 64, 4, (0, 1), (0, 1), (1, 0)),
    ],
)
def test_the_released_form_is_flexgens(t4, opt, prompt, layers, hidden, heads, size, count, weights, cache, states):
    """Large batches, where the floor of GPU memory's bandwidth does not bind; ours has the head's logits besides."""
    theirs = Released(layers, hidden, prompt, 32, size * count, weights, cache, states)
    policy = OffloadPolicy(size, count, Shares(*weights), Shares(*cache), Shares(*states), cpu_attention=True)
    shape = opt(layers, hidden, heads)
    found = predict(shape, t4, Workload(prompt, 32), policy, "released")
    assert found.prefill_s == pytest.approx(layers * theirs.prefill(), rel=0.02)
    assert found.decode_s == pytest.approx(31 * layers * theirs.decode(), rel=0.04)


def test_home_memory_is_flexgens(t4, opt_6_7b):
    """gpu_home of the released code: w·l·wg + 4(s + n)·h·bls·l·cg, and the same on the host."""
    layers, h, s, n, bls = 32, 4096, 512, 32, 16
    policy = OffloadPolicy(4, 4, Shares(gpu=1), Shares(host=1), Shares(gpu=1), cpu_attention=True)
    found = peaks(opt_6_7b, t4, Workload(s, n), policy)
    cache = 4 * (s + n) * h * bls * layers
    # Besides, a batch of K and V widened to fp32.
    assert found["host"].decode_bytes == pytest.approx(cache + 2 * 4 * (s + n) * h * 4)
    home = (8 + 16) * h * h * layers + 2 * s * h * bls
    assert home < found["gpu"].decode_bytes < home + 2 * opt_6_7b.outside + 0.5e9
