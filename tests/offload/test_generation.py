"""Tokens equal transformers' own, wherever weights, KV cache and activations lie."""

import copy
import itertools

import pytest
import torch

from nearflash.abi.errors import CommandError, StateError
from nearflash.offload import Budgets, OffloadedModel, generate
from nearflash.planning.policy import OffloadPolicy, Shares

FAMILIES = [
    *("llama", "gemma2", "opt", "gpt_oss"),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "mixtral", "qwen3_moe")),
]
GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
MIXED = Shares(gpu=0.34, host=0.33, disk=0.33)


def policy(weights=DISK, cache=HOST, activations=GPU, batch_size=3, num_batches=2, **options):
    return OffloadPolicy(batch_size, num_batches, weights, cache, activations, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shares", [DISK, MIXED], ids=["disk", "mixed"])
def test_tokens_are_those_of_transformers(saved, tmp_path, family, shares, prompts, plain):
    folder, model = saved(family)
    rows = prompts()
    done = generate(folder, rows, policy(shares, shares, shares), max_new_tokens=14, scratch=tmp_path)
    assert done.tokens == plain(model, rows, 3, 14)
    assert not list(tmp_path.iterdir())
    assert done.report.link_bytes["weights disk to host"] > 0


def place_everywhere():
    """All tiers; make test has the nine that have every pair."""
    for numbers in itertools.product(range(3), repeat=3):
        places = [(GPU, HOST, DISK)[number] for number in numbers]
        yield pytest.param(*places, marks=[pytest.mark.full] * (sum(numbers) % 3 != 0))


@pytest.mark.parametrize(("weights", "cache", "activations"), list(place_everywhere()))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_every_tier(saved, weights, cache, activations, overlap, prompts, plain):
    folder, model = saved("llama")
    rows = prompts(6)
    places = policy(weights, cache, activations, overlap=overlap, cpu_attention=not overlap)
    assert generate(folder, rows, places, max_new_tokens=6).tokens == plain(model, rows, 3, 6)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cache_on_disk_is_read_and_written_in_blocks(saved, overlap, prompts, plain):
    """Rows of 256 bytes a token: blocks of 16 tokens."""
    folder, model = saved("llama")
    rows = prompts(5, longest=60, shortest=20)
    done = generate(folder, rows, policy(cache=DISK, overlap=overlap), max_new_tokens=40)
    assert done.tokens == plain(model, rows, 3, 40)
    written, read = (done.report.link_bytes[f"cache {way}"] for way in ("host to disk", "disk to host"))
    tokens = 2 * (max(map(len, rows)) + 40) + 40
    assert 0 < written <= 4 * 2 * 3 * 2 * tokens * 256, "layers, K and V, sequences, heads: each byte once"
    assert read > written


def test_a_window_on_disk(saved, prompts, plain):
    folder, model = saved("gemma2")
    rows = prompts(4, longest=50, shortest=10)
    done = generate(folder, rows, policy(cache=DISK), max_new_tokens=48)
    assert done.tokens == plain(model, rows, 3, 48)


def test_stop_tokens_end_texts_early(saved, prompts, plain):
    folder, model = saved("llama")
    rows = prompts(6)
    free = plain(model, rows, 3, 24, stops=())
    stops = sorted({free[0][4], free[3][7]})
    seen = []
    done = generate(
        folder, rows, policy(), max_new_tokens=24, stop_tokens=stops,
        on_text=lambda number, tokens, text: seen.append((number, tokens)),
    )  # fmt: skip
    assert done.tokens == plain(model, rows, 3, 24, stops)
    assert len(done.tokens[0]) <= 5
    assert sorted(seen) == list(enumerate(done.tokens)), "each is reported once"
    assert seen[0][0] in {0, 3}


def test_drawn_tokens_depend_on_prompt_and_seed_alone(saved, prompts):
    folder, _ = saved("llama")
    rows = prompts(6)
    draw = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.9}
    one = generate(folder, rows, policy(batch_size=3), seed=4, **draw).tokens
    other = generate(folder, rows, policy(batch_size=1, num_batches=5), seed=4, **draw).tokens
    assert one == other
    assert generate(folder, rows, policy(), seed=5, **draw).tokens != one
    assert generate(folder, rows, policy(), max_new_tokens=12).tokens != one


def test_a_drawn_token_has_the_softmax_distribution():
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    from nearflash.offload.sampling import GumbelSampler

    cool, likeliest = TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.5)
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    sampler = GumbelSampler([0], cool, 3)
    drawn = torch.stack([sampler(None, logits).argmax(dim=-1) for _ in range(4000)]).flatten()
    share = drawn.bincount(minlength=4) / len(drawn)
    assert torch.allclose(share, (logits[0] / 0.7).softmax(dim=0), atol=0.03)
    narrow = GumbelSampler([0], LogitsProcessorList([cool, likeliest]), 3)
    assert {int(narrow(None, logits).argmax()) for _ in range(100)} == {2}


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_sampling_options_are_checked(saved, temperature, top_p, prompts):
    folder, _ = saved("llama")
    with pytest.raises(CommandError, match="temperature must be above 0"):
        generate(folder, prompts(2), policy(), max_new_tokens=2, temperature=temperature, top_p=top_p)


def test_progress_counts_to_the_end(saved, prompts):
    folder, _ = saved("llama")
    seen = []
    generate(folder, prompts(7), policy(), max_new_tokens=5, stop_tokens=[], progress=seen.append)
    assert [each.step for each in seen] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert all(each.prompts == 7 and each.steps == 5 for each in seen)
    assert seen[-1].tokens_per_s > 0 and seen[2].remaining_s > 0


def test_each_layer_is_read_once_a_pass(saved, prompts):
    """Two batches share each load, and nothing is read that no pass uses."""
    folder, _ = saved("llama")
    with OffloadedModel(folder, policy()) as model:
        layers = sum(source.size_bytes for layer in model.skeleton.layer_sources for source in layer.values())
        done = model.generate(prompts(6), max_new_tokens=5, stop_tokens=[])
    moved = done.report.link_bytes["weights disk to host"]
    assert 5 * layers <= moved <= 5 * layers + 5 * 4 * 4096 * 4, "whole blocks"


def test_half_precision(saved, tmp_path, prompts, plain):
    _, model = saved("llama")
    half = copy.deepcopy(model).to(torch.bfloat16)  # the other tests' model stays as it is
    half.save_pretrained(tmp_path)
    rows = prompts(3)
    want = plain(half, rows, 3, 8)
    assert generate(tmp_path, rows, policy(), max_new_tokens=8).tokens == want
    wide = half.to(torch.float32)  # of the rounded weights
    assert generate(tmp_path, rows, policy(), max_new_tokens=8, dtype=torch.float32).tokens == plain(wide, rows, 3, 8)


def test_budgets_are_kept_or_refused(saved, prompts):
    folder, _ = saved("llama")
    rows = prompts(6)
    free = generate(folder, rows, policy(), max_new_tokens=4).report.peak_bytes
    enough = Budgets(gpu=free["gpu"], host=free["host"], disk=0)
    assert generate(folder, rows, policy(), max_new_tokens=4, budgets=enough).report.peak_bytes == free
    for tier in ("gpu", "host"):
        less = Budgets(**{**free, tier: free[tier] - 1})
        with pytest.raises(CommandError, match=f"budget of {tier} must be"):
            generate(folder, rows, policy(), max_new_tokens=4, budgets=less)
    with pytest.raises(CommandError, match="budget of disk must be"):
        generate(folder, rows, policy(cache=DISK), max_new_tokens=4, budgets=Budgets(disk=4096))


@pytest.mark.parametrize(
    ("rows", "tokens", "message"),
    [([], 4, "at least one"), ([[5], []], 4, "number 1 is empty"), ([[5]], 0, "max_new_tokens")],
)  # fmt: skip
def test_wrong_requests(saved, rows, tokens, message):
    folder, _ = saved("llama")
    with pytest.raises(CommandError, match=message):
        generate(folder, rows, policy(), max_new_tokens=tokens)


def test_a_trace_shows_loads_beside_computing(saved, tmp_path, prompts):
    import json

    folder, _ = saved("llama")
    generate(folder, prompts(6), policy(cache=DISK), max_new_tokens=4, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"compute", "load weights", "wait for weights", "load cache", "store cache"} <= names
    rows = {event["tid"] for event in events if event["name"] in ("compute", "load weights")}
    assert len(rows) == 2


@pytest.mark.parametrize("share", [1, 0.5])
def test_batches_on_a_near_storage_device(saved, prompts, plain, share):
    folder, model = saved("llama")
    rows = prompts(12)
    cache = Shares(device=share, disk=1 - share)
    done = generate(folder, rows, policy(cache=cache), max_new_tokens=10)
    assert done.tokens == plain(model, rows, 3, 10)


def test_an_engine_that_is_given_is_used_and_left_empty(saved, prompts, plain):
    from nearflash.inference import AttentionMode, AttentionPolicy, open_engine
    from nearflash.inference.cache.decoder import kv_shape_of

    folder, model = saved("llama")
    rows, shape = prompts(6), kv_shape_of(model.config)
    with open_engine(shape, AttentionPolicy(AttentionMode.DENSE), tokens=64, sequences=6) as engine:
        done = generate(folder, rows, policy(cache=Shares(device=1)), max_new_tokens=10, engine=engine)
        assert not engine.lengths
        assert engine.counters.heads > 0
    assert done.tokens == plain(model, rows, 3, 10)


@pytest.mark.parametrize(("family", "options"), [("gemma2", {}), ("mixtral", {"expert_bytes": 1 << 20})])
def test_a_model_that_is_called_has_its_weights_layer_by_layer(saved, prompts, plain, family, options):
    """By transformers' own generate and cache, of a window and of experts that are read as they are routed, too."""
    folder, model = saved(family)
    rows = prompts(3)
    with OffloadedModel(folder, policy(MIXED), **options) as opened:
        with opened.call_by_layer() as called:
            assert plain(called, rows, 3, 12) == plain(model, rows, 3, 12)
            assert opened.ledger.links["weights disk to host"] > 0
        assert opened.generate(rows, max_new_tokens=12).tokens == plain(model, rows, 3, 12)


def test_results_are_of_one_attention(saved, prompts, tmp_path):
    """Texts of other keys and values were taken for those asked for."""
    from nearflash.inference import AttentionMode, AttentionPolicy

    folder, _ = saved("llama")
    on_device, rows, file = policy(cache=Shares(device=1)), prompts(3), tmp_path / "done.jsonl"
    generate(folder, rows, on_device, max_new_tokens=4, results=file)
    for attention in (AttentionPolicy(AttentionMode.SPARF, top_k=4), AttentionPolicy(AttentionMode.SPARF, top_k=8)):
        with pytest.raises(StateError, match="its first line has another attention"):
            generate(folder, rows, on_device, max_new_tokens=4, results=file, attention=attention)


@pytest.mark.parametrize("options", [
    {}, {"multi_query": False}, {"multi_query": False, "alibi": True},
    {"new_decoder_architecture": True, "num_kv_heads": 2},
], ids=["one head", "all heads", "alibi", "groups"])  # fmt: skip
def test_kv_heads_that_a_configuration_states_by_other_keys(tmp_path, options, plain):
    """Falcon's `multi_query` is one KV head; its newer decoder repeats heads before the cache."""
    import transformers

    torch.manual_seed(4)
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 2}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, initializer_range=0.2, **options)).eval()
    model.save_pretrained(tmp_path)
    rows = [[5, 6, 7, 8], [9, 10]]
    assert generate(tmp_path, rows, policy(), max_new_tokens=8).tokens == plain(model, rows, 2, 8)
