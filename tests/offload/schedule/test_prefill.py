"""Prefill in parts of a batch: the same tokens; at once where it is not certain what has a row for each sequence."""

import pytest
import torch

from nearflash.offload import generate
from nearflash.offload.cache.kv_cache import TieredLayer
from nearflash.offload.cache.kv_storage import KvForm
from nearflash.offload.schedule import prefill
from nearflash.offload.schedule.fiber import Call
from nearflash.offload.schedule.prefill import compute_layer
from nearflash.offload.tiers.link import host_memory
from nearflash.planning.policy import OffloadPolicy, Shares, prefill_tokens

FAMILIES = [
    *("llama", "gemma2", "opt", "gpt_oss"),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "mixtral", "qwen3_moe")),
]
DISK, HOST, GPU = Shares(disk=1), Shares(host=1), Shares(gpu=1)
SEQUENCES, TOKENS, HIDDEN = 5, 6, 8


@pytest.fixture
def few_tokens(monkeypatch):
    """Two sequences of a test's prompts at a time."""
    monkeypatch.setattr("nearflash.planning.policy._PREFILL_TOKENS", 2 * TOKENS)


@pytest.mark.parametrize("cache", [DISK, HOST, GPU], ids=["disk", "host", "gpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(saved, tmp_path, few_tokens, monkeypatch, family, cache, prompts, plain):
    parts, join = [], prefill._join
    monkeypatch.setattr(prefill, "_join", lambda *given: parts.append(given[2]) or join(*given))
    folder, model = saved(family)
    rows = prompts(7, longest=TOKENS + 1)
    policy = OffloadPolicy(5, 2, DISK, cache, GPU)
    done = generate(folder, rows, policy, max_new_tokens=10, scratch=tmp_path)
    assert done.tokens == plain(model, rows, 5, 10)
    layers = len(model.model.decoder.layers if family == "opt" else model.model.layers)
    assert {rows.start for rows in parts} >= {0, 2, 4} and len(parts) >= 3 * layers


class Layer:
    """Adds what it is given to the hidden states, and notes of how many sequences each call is."""

    def __init__(self, cache):
        self.cache, self.calls = cache, []

    def __call__(self, hidden_states, **kwargs):
        self.calls.append(len(hidden_states))
        keys, _ = self.cache.update(*(hidden_states[:, None] * each for each in (1, 2)))
        for value in kwargs.values():
            hidden_states = hidden_states + (value[0] if isinstance(value, tuple) else value["x"] if isinstance(
                value, dict) else value)  # fmt: skip
        return hidden_states + keys.sum(), hidden_states.flatten(0, 1)


def run(split=True, **kwargs):
    form = KvForm(SEQUENCES, 1, TOKENS, HIDDEN, torch.float32)
    cache = TieredLayer(0, form, None, host_memory(form.size_bytes), None)
    layer, states = Layer(cache), torch.arange(SEQUENCES * TOKENS * HIDDEN).view(SEQUENCES, TOKENS, HIDDEN).float()
    value = compute_layer(Call(layer, layer, (states,), kwargs), cache, split)
    assert cache.length == TOKENS and torch.equal(cache.work[0, :, 0], states)
    return value, layer.calls, states


def test_a_layer_computes_two_sequences_at_a_time(few_tokens):
    (value, flat), calls, states = run(bias=(torch.ones(1, TOKENS, HIDDEN),))
    assert calls == [2, 2, 1]
    assert value.shape == states.shape and torch.equal(flat, (states + 1).flatten(0, 1))


@pytest.mark.parametrize(
    "given",
    [
        torch.randn(SEQUENCES, TOKENS, HIDDEN),
        torch.randn(1, TOKENS, 1),
        (torch.randn(SEQUENCES, TOKENS, 1),),
        torch.randn(TOKENS, HIDDEN),
        torch.randn(HIDDEN),
    ],
)
def test_arguments_with_a_row_a_sequence_are_split(few_tokens, given):
    (_, flat), calls, states = run(given=given)
    assert calls == [2, 2, 1]
    expected = states + (given[0] if isinstance(given, tuple) else given)
    assert torch.equal(flat.view(states.shape), expected)


@pytest.mark.parametrize(
    "given",
    [
        {"x": torch.zeros(SEQUENCES, TOKENS, 1)},  # a table that layers share
        torch.zeros(SEQUENCES, 1, HIDDEN),
        (torch.zeros(SEQUENCES, SEQUENCES, TOKENS, HIDDEN)[0, 0], torch.zeros(SEQUENCES, SEQUENCES, TOKENS, HIDDEN)),
    ],
    ids=["table", "other rows", "three positions a token"],
)
def test_a_call_that_is_not_certain_is_computed_at_once(few_tokens, given):
    _, calls, _ = run(given=given)
    assert calls == [SEQUENCES]


def test_experts_that_are_read_once_are_not_split(few_tokens):
    assert run(split=False)[1] == [SEQUENCES]


def test_tokens_at_a_time():
    assert prefill_tokens(100, 1) == 100, "decode is of the whole batch"
    assert prefill_tokens(4, 512) == prefill_tokens(64, 512) == 2048
    assert prefill_tokens(3, 5000) == 5000, "a sequence at least"
