"""The modes in torch against the bit-exact model, against torch's dense attention, and the algorithm's invariants.

Against the model: q, K and V have fp16 values on both sides. Bounds: the model rounds weights and the output to fp16
and cuts masses: 2^-8 of the largest |V| where the chosen tokens are the same. Where they differ, the keys of the
tokens in question are within 2^-8 of each other.
"""

import numpy as np
import pytest
import torch

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import ShapeError
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.sparse.attention import sparse_attention
from nearflash.inference.sparse.index import index_keys
from nearflash.inference.sparse.traffic import dense_bytes, flash_reads
from nearflash.model.attention.head import attend_repeated
from nearflash.model.attention.memory.index import quantise
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.traffic import traffic

FP16, INT8, INT4 = IndexFormat
POLICIES = {
    "dense": AttentionPolicy(),
    "sparq": AttentionPolicy("sparq", score_dims=16, top_k=0.125, local_window=16),
    "sparf": AttentionPolicy("sparf", score_dims=16, top_k=100, local_window=16),
    "sparf by logits": AttentionPolicy("sparf", score_dims=8, top_k=100, local_window=16, by_probability=False),
    "pages": AttentionPolicy("sparf-page", score_dims=32, top_k=0.25, local_window=40),
    "pages by mass": AttentionPolicy("sparf-page", score_dims=32, top_k=0.5, top_p=0.6, local_window=40),
    "pages and the tail": AttentionPolicy("sparf-page", score_dims=32, top_k=8, local_window=40, keep_tail=True),
}


def model_settings(policy, tokens, dim, layout):
    """What the model takes, from the descriptor's fields."""
    made = policy.descriptor(PageTag(0, 0, 0), dim, tokens, 2, layout, reference=(4, 4) * (policy.mode == "dense"))
    return HeadSettings(
        Mode(made.mode), dim, LOG2E / dim**0.5, made.score_dims, made.top_k, made.local_window, made.top_p,
        made.group_tokens, made.interleaved, made.block_tokens, made.index_format, made.page_bytes, made.reference,
    )  # fmt: skip


@pytest.mark.parametrize("form", IndexFormat)
@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_model(name, form, make_heads, make_layout):
    policy, layout = POLICIES[name], make_layout(8, name != "sparf", 256, form)
    q, k, v, seen = make_heads(positions=2, tokens=769)  # 768 is whole blocks, 769 has a suffix
    done = sparse_attention(q, k, v, seen, policy, layout)
    reads = flash_reads(done.score_dims, done.chosen, seen, layout)
    for head in range(len(q)):
        for position, tokens in enumerate(seen.tolist()):
            half = [x[head, :tokens].numpy().astype(np.float16) for x in (k, v)]
            mean = half[1].astype(np.float64).mean(axis=0).astype(np.float32)
            settings = model_settings(policy, tokens, 64, layout)
            exact = attend_repeated(q[head, position].numpy().astype(np.float16), *half, mean, settings)
            assert exact.out is not None, exact.faults
            chosen = done.chosen[head, position].numpy()
            np.testing.assert_array_equal(np.flatnonzero(done.score_dims[head, position]), exact.score_dims)
            np.testing.assert_array_equal(chosen[:tokens], exact.chosen)
            assert not chosen[tokens:].any()
            difference = np.abs(done.out[head, position].numpy() - exact.out).max()
            assert difference <= 2**-8 * np.abs(half[1]).max()
            wanted = traffic(settings, exact.score_dims, exact.chosen)
            for kind in ("index", "suffix", "gather"):
                own, theirs = getattr(reads, kind), getattr(wanted, kind)
                assert int(own.codewords[head, position]) == theirs.codewords


def test_dense_is_torchs_attention(make_heads, make_layout):
    q, k, v, seen = make_heads(positions=5)
    done = sparse_attention(q, k, v, seen, AttentionPolicy(), make_layout(), scaling=0.2)
    visible = torch.arange(k.shape[1]) < seen[:, None]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k[:, None], v[:, None], visible, scale=0.2
    )  # fmt: skip
    torch.testing.assert_close(done.out.transpose(1, 2), theirs, atol=1e-5, rtol=0)
    reads = flash_reads(done.score_dims, done.chosen, seen, make_layout())
    assert (reads.bytes[0] >= dense_bytes(seen, 64)).all()


@pytest.mark.parametrize("mode", ["sparq", "sparf", "sparf-page"])
@pytest.mark.parametrize("dims", [1, 64])
def test_all_entries_are_dense_for_any_dims(mode, dims, make_heads, make_layout):
    q, k, v, seen = make_heads()
    policy = AttentionPolicy(mode, score_dims=dims, top_k=1.0)
    done, dense = (sparse_attention(q, k, v, seen, p, make_layout()) for p in (policy, AttentionPolicy()))
    torch.testing.assert_close(done.out, dense.out, atol=1e-5, rtol=0)
    assert done.chosen.sum(dim=-1).equal(seen.expand(len(q), -1))


def test_layouts_change_no_number_of_single_tokens(make_heads, make_layout):
    q, k, v, seen = make_heads()
    outs = [
        sparse_attention(q, k, v, seen, POLICIES["sparf"], make_layout(n, inter, block, FP16)).out
        for n, inter, block in ((16, False, 256), (8, True, 64), (32, False, 1024))
    ]  # fmt: skip
    assert outs[0].equal(outs[1]) and outs[0].equal(outs[2])


def test_a_permutation_of_dims_changes_nothing(make_heads, make_layout):
    q, k, v, seen = make_heads()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    plain, mixed = (
        sparse_attention(a, b, v, seen, POLICIES["pages"], make_layout())
        for a, b in ((q, k), (q[..., order], k[..., order]))
    )  # fmt: skip
    assert plain.chosen.equal(mixed.chosen)
    torch.testing.assert_close(plain.out, mixed.out, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_position_sees_what_it_would_see_alone(name, make_heads, make_layout):
    q, k, v, seen = make_heads(positions=4, tokens=514)  # 511 to 514: the index grows by a block on the way
    policy, layout = POLICIES[name], make_layout()
    done = sparse_attention(q, k, v, seen, policy, layout)
    for place, tokens in enumerate(seen.tolist()):
        alone = sparse_attention(
            q[:, place : place + 1], k[:, :tokens], v[:, :tokens], seen[place : place + 1], policy, layout
        )  # fmt: skip
        assert done.chosen[:, place, :tokens].equal(alone.chosen[:, 0])
        torch.testing.assert_close(done.out[:, place], alone.out[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", [INT8, INT4])
def test_the_index_is_the_models(form):
    rng = np.random.default_rng(3)
    k = (rng.standard_normal((2, 300, 16)) * 2.0 ** rng.integers(-12, 4, 16)).astype(np.float16)
    k[0, :, 3] = 0.5  # a row without a scale
    own = index_keys(torch.from_numpy(k), 128, form).numpy()
    for head in range(2):
        for start in (0, 128):
            block = quantise(k[head, start : start + 128], form)
            exact = block.zero.astype(np.float64) + block.scale.astype(np.float64) * block.codes
            np.testing.assert_array_equal(own[head, start : start + 128], exact.astype(np.float32))
    np.testing.assert_array_equal(own[:, 256:], k[:, 256:].astype(np.float32))


def test_shapes_that_do_not_fit_are_refused(make_heads, make_layout):
    q, k, v, seen = make_heads()
    with pytest.raises(ShapeError, match=r"q must be \(heads, positions, group, dim\)"):
        sparse_attention(q[0], k, v, seen, AttentionPolicy(), make_layout())
    with pytest.raises(ShapeError, match="tokens must be 1 to 700 for each of 3 positions"):
        sparse_attention(q, k, v, seen + 1, AttentionPolicy(), make_layout())


def test_the_operator_is_the_function_at_one_position(make_heads, make_layout):
    q, k, v, seen = make_heads(positions=1)
    policy, layout = POLICIES["pages by mass"], make_layout()
    resolved = policy.resolve(int(seen[0]), 64, layout)
    arguments = (
        q[:, 0], k, v, seen.expand(2), torch.tensor([resolved.top_k] * 2), resolved.score_dims, resolved.local_window,
        resolved.top_p, True, 16, layout.block_tokens, int(layout.index_format), 0.125,
    )  # fmt: skip
    out, chosen = torch.ops.nearflash.attend(*arguments)
    wanted = sparse_attention(q, k, v, seen, policy, layout)
    assert out.equal(wanted.out[:, 0]) and chosen.equal(wanted.chosen[:, 0])
    torch.library.opcheck(torch.ops.nearflash.attend, arguments)
