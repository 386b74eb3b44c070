"""Policies: their numbers for any S, their descriptors, and what they refuse."""

import subprocess
import sys

import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.inference.policy.policy import AttentionPolicy, ResolvedPolicy
from nearflash.storage.kv import KvLayout

OWNER = PageTag(3, 1, 2)


def make_layout(group_tokens=16, interleaved=False, block_tokens=256, index_format=IndexFormat.INT4, page_bytes=4096):
    return KvLayout(group_tokens, interleaved, block_tokens, index_format, page_bytes)


@pytest.mark.parametrize(
    ("kinds", "tokens", "resolved"),
    [
        (dict(mode="dense"), 1000, ResolvedPolicy(0, 0, 64, 0)),
        (dict(mode="sparf", score_dims=0.125, top_k=1 / 16, local_window=16), 4096, ResolvedPolicy(8, 256, 16, 0)),
        (dict(mode="sparf-page", score_dims=32, top_k=0.125), 4096, ResolvedPolicy(32, 32, 64, 0)),
        (dict(mode="sparf-page", score_dims=32, top_k=40, top_p=0.95), 4095, ResolvedPolicy(32, 40, 64, 62259)),
        # 70 entries in all
        (dict(mode="sparf-page", score_dims=1.0, top_k=100), 1111, ResolvedPolicy(64, 70, 64, 0)),
        # the local window 53..116 needs entries 3..7
        (dict(mode="sparf-page", top_k=1), 117, ResolvedPolicy(16, 5, 64, 0)),
        (dict(mode="sparf", top_k=1), 20, ResolvedPolicy(16, 20, 20, 0)),
        # 7 of 8 entries, then all 4
        (dict(mode="sparf-page", top_k=1, local_window=1, min_tokens=100), 128, ResolvedPolicy(16, 7, 1, 0)),
        (dict(mode="sparf-page", top_k=1, local_window=1, min_tokens=100), 60, ResolvedPolicy(16, 4, 1, 0)),
        # a suffix of 200 tokens: 13 entries, and 5 of the others; then none; then nothing but a suffix
        (dict(mode="kvswap", top_k=5), 712, ResolvedPolicy(16, 18, 200, 0)),
        (dict(mode="sparf-page", top_k=5, keep_tail=True), 712, ResolvedPolicy(16, 18, 200, 0)),
        (dict(mode="sparf-page", top_k=5, keep_tail=True), 768, ResolvedPolicy(16, 5, 64, 0)),
        (dict(mode="sparf-page", top_k=0.25, keep_tail=True), 250, ResolvedPolicy(16, 16, 250, 0)),
    ],
)
def test_resolved(kinds, tokens, resolved):
    assert AttentionPolicy(**kinds).resolve(tokens, 64, make_layout()) == resolved


def test_a_descriptor_has_the_numbers_and_the_layout():
    layout = make_layout(8, True, 512, IndexFormat.INT8)
    policy = AttentionPolicy("sparf-page", score_dims=32, top_k=0.25, top_p=0.5, local_window=10)
    made = policy.descriptor(OWNER, 128, 1000, 3, layout)
    assert made.mode == Mode.PAGE | Mode.PROBABILITY
    assert (made.page_tag, made.dim, made.tokens, made.group) == (OWNER, 128, 1000, 3)
    assert (made.score_dims, made.top_k, made.local_window, made.top_p) == (32, 31, 10, 32768)
    assert (made.group_tokens, made.interleaved, made.block_tokens, made.index_format, made.page_bytes) == (
        8, True, 512, IndexFormat.INT8, 4096
    )  # fmt: skip
    assert made.scale == pytest.approx(LOG2E / 128**0.5)
    assert policy.descriptor(OWNER, 128, 1000, 3, layout, scaling=0.5).scale == pytest.approx(LOG2E / 2)
    assert len(made.pack()) == 128


def test_descriptors_carry_references():
    dense = AttentionPolicy().descriptor(OWNER, 64, 10, 2, make_layout())
    assert (dense.mode, dense.reference) == (Mode.DENSE | Mode.REFERENCE, (0, 0))
    again = AttentionPolicy("sparf", by_probability=False).descriptor(OWNER, 64, 10, 2, make_layout(), reference=(5, 6))
    assert (again.mode, again.reference) == (Mode.REFERENCE, (5, 6))


def test_overrides_for_a_head_go_before_those_for_its_layer():
    layer, head = AttentionPolicy(), AttentionPolicy("sparf", top_k=7)
    policy = AttentionPolicy("sparf-page", overrides={1: layer, (1, 2): head})
    assert [policy.at(*place) for place in ((0, 2), (1, 1), (1, 2))] == [policy, layer, head]
    assert policy.descriptor(OWNER, 64, 100, 2, make_layout()).top_k == 64  # the window
    assert policy.descriptor(PageTag(3, 1, 0), 64, 100, 2, make_layout()).mode & Mode.DENSE


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (dict(mode="quest"), "mode must be one of dense, sparq, sparf, sparf-page, kvswap, not 'quest'"),
        (dict(score_dims=0), "score_dims must be a count from 1 or a fraction above 0, up to 1.0, not 0"),
        (dict(top_k=1.5), "top_k must be a count from 1 or a fraction above 0, up to 1.0, not 1.5"),
        (dict(mode="sparf", top_p=1.0), "top_p must be 0, or below 1 and with by_probability, not 1.0"),
        (dict(mode="kvswap", top_p=0.5), "top_p must be 0, or below 1 and with by_probability"),
        (
            dict(mode="kvswap", overrides={1: AttentionPolicy()}),
            "overrides must be policies without overrides, and",
        ),
        (dict(mode="sparf", top_p=0.5, by_probability=False), "top_p must be 0, or below 1 and with by_probability"),
        (dict(min_tokens=-1), "min_tokens must be a count, or 0, not -1"),
        (dict(local_window=0), "local_window must be a count from 1, not 0"),
        (dict(overrides={0: AttentionPolicy(overrides={1: AttentionPolicy()})}), "policies without overrides"),
    ],
)
def test_what_makes_no_sense_is_refused(kinds, message):
    with pytest.raises(CommandError) as raised:
        AttentionPolicy(**kinds)
    assert message in str(raised.value)


def test_no_policy_resolves_for_no_tokens_and_too_many_dims():
    with pytest.raises(CommandError, match="tokens must be at least 1, not 0"):
        AttentionPolicy().resolve(0, 64, make_layout())
    with pytest.raises(CommandError, match="score_dims must be at most 64, the head dimension, not 65"):
        AttentionPolicy("sparf", score_dims=65).resolve(10, 64, make_layout())


def test_the_policy_loads_no_torch():
    code = "import sys, nearflash.inference.policy.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
