"""GpuEngine on a GPU, or under Triton's interpreter on the CPU: the CPU's engine's numbers, whatever memory keeps."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, ShapeError
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.engines.gpu import memory as gpu_memory
from nearflash.inference.engines.gpu.engine import GpuEngine
from nearflash.inference.engines.gpu.kernels import (
    attend_runs,
    entry_keys,
    join_parts,
    score_index,
    score_keys,
    score_query,
)
from nearflash.inference.engines.paged.reads import SequenceReads
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.sparse.attention import PROBABILITY_KEY, Scan, choose_tokens
from nearflash.inference.sparse.selection import choose, logit_scales, top_dims
from nearflash.storage.kv import StoredHead

LENGTHS = [1, 37, 70]
POLICIES = {
    "dense": AttentionPolicy(),
    "sparq": AttentionPolicy("sparq", score_dims=0.5, top_k=0.25, local_window=4),
    "sparf": AttentionPolicy("sparf", score_dims=0.25, top_k=16, local_window=8),
    "logits": AttentionPolicy("sparf", score_dims=8, top_k=16, local_window=2, by_probability=False),
    "page": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=8),
    "mass": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.5, top_p=0.8, local_window=1, keep_tail=True),
}


@pytest.fixture
def make_engine(make_store, shape, gpu):
    engines = []

    def make(policy, layout, index_cache_bytes=1 << 20, page_cache_bytes=1 << 20, **options):
        store = make_store(shape, layout, **options)
        engines.append(GpuEngine(store, policy, gpu, index_cache_bytes=index_cache_bytes,
                                 page_cache_bytes=page_cache_bytes))  # fmt: skip
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def assert_near(out, want):
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", ["page", *(pytest.param(n, marks=pytest.mark.full) for n in ("dense", "sparq", "sparf", "logits", "mass"))]
)
def test_every_mode_gives_what_arrays_give(
    make_engine, make_layout, shape, filled, name, interleaved, draw_q, expected
):
    policy, layout = POLICIES[name], make_layout(interleaved=interleaved)
    engine = make_engine(policy, layout)
    numbers, stored = filled(engine, shape, LENGTHS)
    q = draw_q(shape, len(LENGTHS), 2)
    for _ in range(2):  # from flash, then from memory
        out = engine.attend(1, numbers, q)
        assert out.dtype == np.float32
        assert_near(out, expected(q, stored, policy, layout))
    assert engine.counters.heads == 18 and engine.cache_bytes > 0


@pytest.mark.parametrize("form", IndexFormat)
@pytest.mark.parametrize("suffix_bytes", [0, 1 << 20])
@pytest.mark.parametrize("lengths", [[99], pytest.param([99, 49], marks=pytest.mark.full)], ids=["one", "two"])
def test_every_index_format(make_engine, make_layout, shape, filled, form, suffix_bytes, lengths, draw_q, expected):
    policy, layout = POLICIES["page"], make_layout(form=form, block_tokens=48, group_tokens=4)
    engine = make_engine(policy, layout, suffix_bytes=suffix_bytes)
    numbers, stored = filled(engine, shape, lengths)
    q = draw_q(shape, len(lengths), 1)
    assert_near(engine.attend(1, numbers, q, 0.3), expected(q, stored, policy, layout, 0.3))


@pytest.mark.full
@pytest.mark.parametrize("index_cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("page_cache_bytes", [0, 40960, 1 << 20])
def test_memory_decides_what_is_read_not_what_comes_out(
    make_engine, make_layout, shape, filled, index_cache_bytes, page_cache_bytes, draw_q, expected, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(GpuEngine, "_read_next", lambda *_, **__: None)  # what a call itself reads is counted
    policy, layout, reads = POLICIES["page"], make_layout(), []
    engine = make_engine(policy, layout, index_cache_bytes, page_cache_bytes)
    numbers, stored = filled(engine, shape, [139, 97])
    for seed in (1, 1, 2):
        q, before = draw_q(shape, 2, 2, seed=seed), dict(engine.counters.flash_bytes)
        assert_near(engine.attend(1, numbers, q), expected(q, stored, policy, layout))
        now = engine.counters.flash_bytes
        reads.append({kind: now[kind] - before.get(kind, 0) for kind in now})
    assert (reads[1]["index"] == 0) == bool(index_cache_bytes)
    assert (reads[1]["token"] == 0) == (page_cache_bytes == 1 << 20)
    assert engine.cache_bytes <= index_cache_bytes + page_cache_bytes


def test_what_was_chosen_last_is_read_before_the_next_call(make_engine, make_layout, shape, filled, draw_q):
    """By one read of all sequences; each takes its own of it, and what lacks, to the same bits."""
    engine, outs = make_engine(POLICIES["page"], make_layout(), page_cache_bytes=0), []
    numbers, _ = filled(engine, shape, [139, 97])
    first, other = (draw_q(shape, 2, 2, seed=seed) for seed in (1, 2))
    for q in (other, first, first, other):
        ahead = len(engine._ahead)
        outs.append((ahead, engine.attend(1, numbers, q)))
        engine._settle()
    assert outs[3][0] == 2
    np.testing.assert_array_equal(outs[1][1], outs[2][1])
    np.testing.assert_array_equal(outs[0][1], outs[3][1])


@pytest.mark.full
def test_a_policy_for_each_head_softcap_and_sinks(make_engine, make_store, make_layout, shape, filled, draw_q):
    policy = AttentionPolicy(
        "sparf-page", score_dims=0.5, top_k=0.25, local_window=8,
        overrides={(1, 1): AttentionPolicy(), (1, 2): AttentionPolicy("sparf", score_dims=4, top_k=9, local_window=2)},
    )  # fmt: skip
    layout = make_layout()
    engines = make_engine(policy, layout), CpuEngine(make_store(shape, layout), policy)
    q, sinks = draw_q(shape, 2, 3), np.random.default_rng(3).standard_normal((3, 3)).astype(np.float32)
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 1.5, "sinks": sinks}):
        outs = []
        for engine in engines:
            numbers, _ = filled(engine, shape, [139, 60])
            outs.append(engine.attend(1, numbers, q, **options))
        assert_near(*outs)


@pytest.mark.parametrize("page_cache_bytes", [0, 60000, pytest.param(1 << 20, marks=pytest.mark.full)])
def test_several_tokens(make_engine, make_store, make_layout, shape, filled, monkeypatch, page_cache_bytes):
    monkeypatch.setattr(GpuEngine, "logits_at_once", 3 * 5 * 2 * 8 * 4)
    layout, policy = make_layout(), POLICIES["page"]
    engines = (
        make_engine(policy, layout, page_cache_bytes=page_cache_bytes),
        CpuEngine(make_store(shape, layout), policy),
    )
    q = np.random.default_rng(5).standard_normal((2, shape.kv_heads, 5, 2, shape.dim)).astype(np.float16)
    sinks = np.full((3, 2), 0.5, np.float32)
    outs = []
    for engine in engines:
        numbers, _ = filled(engine, shape, [139, 70])
        outs.append(engine.attend(1, numbers, q, softcap=3.0, sinks=sinks))
        with pytest.raises(ShapeError, match="at most the 139 tokens"):
            engine.attend(1, numbers[:1], np.zeros((1, 3, 140, 2, shape.dim), np.float16))
    assert_near(*outs)


@pytest.mark.full
@pytest.mark.parametrize(
    "lengths", [(138, 70), pytest.param((138, 100, 70, 9), marks=pytest.mark.full)], ids=["two crops", "four crops"]
)
def test_crops_forks_and_frees_leave_nothing_of_before(
    make_engine, make_layout, shape, filled, draw_q, expected, lengths
):
    """What lies in GPU memory of tokens that were cut off would be taken for those that came after."""
    policy, layout = POLICIES["page"], make_layout()
    engine = make_engine(policy, layout)
    (number,), ((k, v),) = filled(engine, shape, [139])
    engine.append(number, 0, k, v)
    q = draw_q(shape, 1, 2)
    engine.attend(1, [number], q)
    child = engine.fork(number)
    for length in lengths:
        new = np.random.default_rng(length).standard_normal((2, shape.kv_heads, 60, shape.dim)).astype(np.float16)
        engine.crop(number, length)
        for layer in range(2):
            engine.append(number, layer, *new)
        own = [np.concatenate([x[:, :length], y], axis=1) for x, y in zip((k, v), new, strict=True)]
        engine.attend(1, [number], q)
        out = engine.attend(1, [number, child], np.concatenate([q, q]))
        assert_near(out, expected(np.concatenate([q, q]), [own, (k, v)], policy, layout))
        k, v, before = *own, (k, v)
        engine.free(child)
        child = engine.fork(number)
    engine.free(number)
    engine.free(child)
    assert engine.cache_bytes == 0 and before


def test_kernels_are_right_at_odd_shapes(gpu):
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(2, 5, 48, generator=rng)
    kv = torch.randn(2, 3, 37, 2, 48, generator=rng).half()  # rows, runs, tokens, K and V, dim
    entries, stored = torch.rand(2, 28, generator=rng) < 0.3, kv.to(gpu)  # of four tokens each
    chosen = entries.repeat_interleave(4, dim=1)
    k_at = stored.data_ptr() + torch.arange(6).reshape(2, 3) * (37 * 96 * 2)
    first, ends = torch.arange(3).repeat(2, 1) * 37, torch.tensor([111, 30])
    given = q, k_at, torch.full((2,), 48), first, torch.tensor([3, 1]), ends
    parts = attend_runs(*(x.to(gpu) for x in given), 37, 96, entries.to(gpu), 4, 0.0)
    assert parts[0].shape[1] == 3
    out, log_sum = (x.cpu() for x in join_parts([parts]))
    for row, end in enumerate(ends.tolist()):
        keys, values = (x[:end] for x in kv[row].float().flatten(0, 1).unbind(1))
        logits = (q[row] @ keys.mT).masked_fill(~chosen[row, :end], -torch.inf)
        assert torch.allclose(out[row], logits.softmax(-1) @ values, atol=1e-5)
        assert torch.allclose(log_sum[row], logits.logsumexp(-1), atol=1e-5)
    codes = torch.randint(0, 256, (1, 3, 8, 24), generator=rng).byte()
    factors, dims = torch.rand(1, 3, 8, 2, generator=rng).half(), torch.tensor([[1, 4, 7]])
    codes_at, factors_at, own = codes.to(gpu), factors.to(gpu), q[:1, :, :8].contiguous().to(gpu)
    at = [torch.tensor([x.data_ptr()], device=gpu) for x in (codes_at, factors_at)]
    scores = torch.full((1, 5, 150), -torch.inf, device=gpu)
    score_index(own, dims.to(gpu), *at, torch.tensor([3], device=gpu), 48, 4, scores)
    k = torch.randn(6, 8, generator=rng).half().to(gpu)
    score_keys(own, *torch.tensor([[k.data_ptr()], [144], [6]], device=gpu), 6, scores)
    scores = scores.cpu()
    assert torch.allclose(scores[0, :, 144:], (own[0] @ k.float().mT).cpu(), atol=1e-4)
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() * factors[..., :1] + factors[..., 1:]
    want = torch.einsum("gr,brt->gbt", q[0, :, dims[0]], numbers[0, :, dims[0]]).flatten(1)
    assert torch.allclose(scores[0, :, :144], want, atol=1e-4)


@pytest.mark.parametrize("dim", [8, 48])
def test_dims_and_their_part_of_q_are_those_of_arrays(gpu, dim):
    q = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(1))
    q[:2, :, 3:9] = q[0, 0, 0]  # sums that are equal: the lower dims
    q[4] = 0
    part, dims = (x.cpu() for x in score_query(q.to(gpu), 5, 0.3))
    mask = top_dims(q, 5)
    assert torch.equal(dims, mask.nonzero()[:, 1].view(5, 5))
    want = q * logit_scales(q, mask, 0.3).unsqueeze(-1) * mask.unsqueeze(-2)
    assert torch.allclose(part, want, rtol=1e-6)


@pytest.mark.parametrize("entry_tokens", [1, 5, 8])
@pytest.mark.parametrize("by_probability", [True, False])
@pytest.mark.parametrize("keep_tail", [True, False])
def test_entries_are_chosen_as_by_arrays(gpu, entry_tokens, by_probability, keep_tail):
    logits = torch.randn(3, 2, 203, generator=torch.Generator().manual_seed(1)) * 3
    tokens = torch.tensor([203, 80, 1])
    logits.masked_fill_((torch.arange(203) >= tokens[:, None])[:, None], -torch.inf)
    scan = Scan(4, 6, 50000, by_probability, entry_tokens, 32, IndexFormat.INT4, keep_tail)
    top_k, shares = torch.tensor([30, 9, 1]), logits.softmax(dim=-1)
    windows = (tokens % 32 if keep_tail else 0 * tokens).clamp(min=6)
    ranked, factor = (None, PROBABILITY_KEY) if by_probability else (logits.to(gpu), LOG2E)
    keys, weights, of_entries = entry_keys(
        shares.to(gpu), ranked, tokens.to(gpu), windows.to(gpu), entry_tokens, factor
    )  # fmt: skip
    chosen = choose(keys.cpu(), top_k, weights.cpu(), scan.top_p)
    want = choose_tokens(logits[:, None], shares[:, None], tokens[:, None], top_k[:, None], scan)[:, 0]
    assert torch.equal(chosen.repeat_interleave(entry_tokens, dim=1)[:, :203], want)
    assert torch.allclose(of_entries.cpu().sum(dim=-1), torch.ones(3, 2))


def test_bad_input(make_engine, make_layout, shape):
    engine = make_engine(POLICIES["dense"], make_layout())
    with pytest.raises(CommandError, match="sequence"):
        engine.attend(1, [9], np.zeros((1, 3, 1, shape.dim), np.float16))


def stored_of(tokens, flash_tokens, kv):
    """What GpuSuffixes takes of a layer: K and V of all tokens, of which the last ones are in memory."""
    k, v = kv[:, :, flash_tokens:tokens]
    nothing = np.zeros((3, 0), np.int64)
    return StoredHead(
        4, PageTag(0, 1, 0), tokens, nothing, nothing, nothing, nothing, k, v, np.zeros((3, 8), np.float32)
    )


def test_only_new_tokens_are_sent(monkeypatch, gpu):
    kv, sent = np.random.default_rng(1).standard_normal((2, 3, 400, 8)).astype(np.float16), []
    send = gpu_memory.upload
    monkeypatch.setattr(
        gpu_memory, "upload", lambda array, device: sent.append(array.size // (2 * 3 * 8)) or send(array, device)
    )
    suffixes = gpu_memory.GpuSuffixes(torch.device(gpu))

    def check(tokens, flash_tokens, *parts):
        sent.clear()
        found = suffixes.of([stored_of(tokens, flash_tokens, kv)])[0].cpu().numpy()
        assert np.array_equal(found, kv[:, :, flash_tokens:tokens]) and sent == [*parts]

    check(10, 0, 10)
    check(10, 0)
    check(11, 0, 1)
    check(70, 0, 70)  # more than there was room for
    check(71, 0, 1)
    check(65, 64, 1)  # a block is on flash now
    check(64, 64)
    check(90, 64, 25)
    suffixes.drop(4)
    check(90, 64, 26)
    suffixes.drop(5)
    check(90, 64)


def test_index_rows_are_read_once(make_store, make_layout, shape, filled, gpu):
    engine = CpuEngine(make_store(shape, make_layout()), POLICIES["page"])
    (number,), _ = filled(engine, shape, [139])
    reads = SequenceReads(engine.store, engine.store.layer(number, 1), [0, 1, 2], engine._read)
    want = reads.blocks(range(4))
    index = gpu_memory.GpuIndex(2 * want.size_bytes, torch.device(gpu))
    for blocks in (2, 4, 3, 4):
        codes, factors = (rows.cpu() for rows in index.rows(reads, blocks))
        assert np.array_equal(codes, want.codes[:, :blocks]) and np.array_equal(factors, want.factors[:, :blocks])
    assert index.size_bytes == want.size_bytes
    before = engine.counters.flash_bytes["index"]
    index.truncate(number, 1)
    assert index.size_bytes == want.size_bytes // 4
    assert np.array_equal(index.rows(reads, 4)[0].cpu(), want.codes)
    assert engine.counters.flash_bytes["index"] - before == before * 3 // 8  # of four blocks, read twice so far
    index.truncate(number, 0)
    assert index.size_bytes == 0
    engine.close()


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nearflash.inference.engines.gpu.kernels import _attend, _entries, _join, _query, _score, _score_keys

KINDS = {"masks": "*u8", "softcap": "fp32", "scaling": "fp32", "most": "fp32"}
KINDS |= dict.fromkeys(["codes_at", "factors_at", "blocks", "dims", "k_at", "v_from", "first", "counts", "ends",
                        "tokens", "windows"], "*i64")
KINDS |= dict.fromkeys(["q", "part", "scores", "largest", "total", "out", "every", "log_sum", "probabilities", "logits",
                        "keys", "plain", "shares"], "*fp32")
for kernel, sizes in (
    (_score, {"BITS": 4, "GROUP": 4, "CODES": 256}),
    (_query, {"GROUP": 4, "DIM": 64}),
    (_entries, {"ENTRIES": 64, "EACH": 16, "BY_LOGIT": False}),
    (_join, {"SPLITS": 64, "DIM": 64}),
    (_score_keys, {"GROUP": 16, "DIM": 64, "TILE": 32}),
    (_attend, {"GROUP": 16, "DIM": 64, "TILE": 32, "MASKED": True, "CAPPED": True}),
):
    own = KINDS | ({"tokens": "i32"} if kernel is _score else {})
    kinds = {name: "constexpr" if name in sizes else own.get(name, "i32") for name in kernel.arg_names}
    made = compile(ASTSource(kernel, kinds, sizes), target=GPUTarget("cuda", 90, 32))
    assert "cubin" in made.asm, made.asm.keys()
"""


def test_the_kernels_compile_for_a_gpu(tmp_path):
    """Without one: the interpreter takes what the compiler does not, as annotations of arguments."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", COMPILED], env=given | {"TRITON_CACHE_DIR": str(tmp_path)}, check=True, timeout=300
    )
