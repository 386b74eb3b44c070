"""Whole runs: blocks that are not full, results beside policies, and what a report has of them."""

import json

import pytest
import torch

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.offload import Budgets, OffloadedModel, generate
from nearflash.planning.policy import OffloadPolicy, Shares

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)


def policy(batch_size, num_batches, **options):
    return OffloadPolicy(batch_size, num_batches, DISK, HOST, GPU, **options)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize(("batch_size", "num_batches"), [(1, 1), (2, 3), (4, 1), (16, 2)])
def test_blocks_that_are_not_full(saved, prompts, plain, count, batch_size, num_batches):
    folder, model = saved("llama")
    rows = prompts(count, seed=count)
    done = generate(folder, rows, policy(batch_size, num_batches), max_new_tokens=5)
    assert done.tokens == plain(model, rows, batch_size, 5)
    assert done.texts == [""] * count and done.resumed == 0


def test_one_new_token_is_the_prompts_own(saved, prompts, plain):
    folder, model = saved("llama")
    rows = prompts(5)
    done = generate(folder, rows, policy(2, 2), max_new_tokens=1)
    assert done.tokens == plain(model, rows, 2, 1)
    assert done.report.new_tokens == 5


def test_a_model_generates_again_and_again(saved, prompts, plain):
    """Of other prompts, lengths and stops; what an earlier run left does not show."""
    folder, model = saved("llama")
    with OffloadedModel(folder, policy(2, 2)) as opened:
        for seed, steps in ((1, 9), (2, 3), (3, 14), (1, 9)):
            rows = prompts(5, seed=seed, longest=10 + seed * 9)
            assert opened.generate(rows, max_new_tokens=steps).tokens == plain(model, rows, 2, steps)
        held = dict(opened.ledger.held)
    assert not any(opened.ledger.held.values()) or opened.ledger.held["gpu"] < held["gpu"]


def test_a_report_adds_up(saved, prompts):
    folder, _ = saved("llama")
    with OffloadedModel(folder, policy(2, 2)) as opened:
        first = opened.generate(prompts(6), max_new_tokens=6, stop_tokens=[]).report
        second = opened.generate(prompts(6), max_new_tokens=6, stop_tokens=[]).report
    for report in (first, second):
        assert report.new_tokens == 36
        assert report.prefill_s > 0 and report.decode_s > 0
        assert report.prefill_s + report.decode_s <= report.total_s
        assert sum(report.seconds.values()) <= report.total_s
        assert report.tokens_per_s == pytest.approx(36 / report.total_s)
        assert report.peak_process_bytes > sum(report.peak_bytes.values())
    assert first.peak_bytes == second.peak_bytes and first.weights_s == second.weights_s > 0
    ratio = second.link_bytes["weights disk to host"] / first.link_bytes["weights disk to host"]
    assert 0.8 < ratio <= 1, "bytes are of one call each; the first layers may be there already"


def test_results_of_one_policy_serve_another(saved, tmp_path, prompts):
    """Where weights lie, and how large blocks are, does not belong to what a text depends on."""
    folder, _ = saved("llama")
    rows, file = prompts(4), tmp_path / "results"
    one = generate(folder, rows, policy(2, 1), max_new_tokens=5, results=file)
    other = OffloadPolicy(1, 3, GPU, GPU, GPU)
    again = generate(folder, rows, other, max_new_tokens=5, results=file)
    assert again.tokens == one.tokens and again.resumed == 4
    header = json.loads(file.read_text().splitlines()[0])
    assert header["settings"]["generation"]["max_new_tokens"] == 5


def test_results_serve_experts_read_one_by_one_and_a_model_that_has_run(saved, tmp_path, prompts):
    """Where weights lie after a run, or routers that stay in memory, is no other model."""
    folder, _ = saved("mixtral")
    rows, file, disk = prompts(2), tmp_path / "results", OffloadPolicy(2, 1, Shares(disk=1), GPU, GPU)
    with OffloadedModel(folder, disk) as model:
        one = model.generate(rows, max_new_tokens=3, results=file)
        assert model.generate(rows, max_new_tokens=3, results=file).resumed == 2
    again = generate(folder, rows, disk, max_new_tokens=3, results=file, expert_bytes=1 << 20)
    assert again.tokens == one.tokens and again.resumed == 2


def test_another_models_results_are_refused(saved, tmp_path, prompts):
    folder, _ = saved("llama")
    wider, _ = saved("llama", intermediate_size=128)
    rows, file = prompts(2), tmp_path / "results"
    generate(folder, rows, policy(2, 1), max_new_tokens=3, results=file)
    with pytest.raises(OSError, match="its first line has another configuration, modules, weights"):
        generate(wider, rows, policy(2, 1), max_new_tokens=3, results=file)


def test_prompts_of_text_need_a_tokenizer(saved):
    folder, _ = saved("llama")
    with pytest.raises(CommandError, match=f"{folder} has no tokenizer, .*: copy tokenizer_config.json"):
        generate(folder, ["Once upon a time"], policy(1, 1), max_new_tokens=2)


def save_with_tokenizer(model, folder):
    """A model, and a tokenizer of the words w0 to w96."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(97)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w2").save_pretrained(folder)


def test_results_are_of_a_tokenizer_that_is_there(saved, tmp_path, prompts):
    """A tokenizer_config.json decided it: alone it has no tokens, and a tokenizer.json without it was left out."""
    folder, file = tmp_path / "model", tmp_path / "results"
    save_with_tokenizer(saved("llama")[1], folder)
    (folder / "tokenizer_config.json").unlink()
    generate(folder, prompts(2), policy(2, 1), max_new_tokens=2, results=file)
    (folder / "tokenizer.json").rename(folder / "tokenizer_config.json")
    with pytest.raises(OSError, match="its first line has another tokenizer"):
        generate(folder, prompts(2), policy(2, 1), max_new_tokens=2, results=file)
    assert generate(folder, prompts(2), policy(2, 1), max_new_tokens=2, results=tmp_path / "other").texts == ["", ""]


def test_texts_are_decoded_where_there_is_a_tokenizer(saved, tmp_path):
    save_with_tokenizer(saved("llama")[1], tmp_path)
    seen = {}
    done = generate(
        tmp_path, ["w5 w9", "w7 w8 w9"], policy(2, 1), max_new_tokens=4, stop_tokens=[],
        on_text=lambda number, tokens, text: seen.update({number: text}),
    )  # fmt: skip
    assert done.tokens == generate(tmp_path, [[5, 9], [7, 8, 9]], policy(2, 1), max_new_tokens=4, stop_tokens=[]).tokens
    for number, (tokens, text) in enumerate(zip(done.tokens, done.texts, strict=True)):
        shown = [token for token in tokens if token not in (0, 2)]
        assert text.split() == [f"w{token}" for token in shown] and seen[number] == text


def test_cpu_attention_saves_the_copies(saved, prompts):
    folder, _ = saved("llama")
    here = generate(folder, prompts(4), policy(2, 2, cpu_attention=True), max_new_tokens=6).report
    there = generate(folder, prompts(4), policy(2, 2), max_new_tokens=6).report
    assert not here.link_bytes.get("cache host to gpu") and there.link_bytes["cache host to gpu"] > 0
    assert here.peak_bytes["gpu"] < there.peak_bytes["gpu"]


def test_budgets_hold_for_the_largest_block(saved, prompts):
    """Refused before the first block is computed, though that one would fit."""
    folder, _ = saved("llama")
    rows = [[5, 6, 7], [5, 6, 7], list(range(3, 90))]
    own = OffloadPolicy(2, 1, DISK, GPU, GPU)
    short = generate(folder, rows[:2], own, max_new_tokens=3).report.peak_bytes["gpu"]
    seen = []
    with pytest.raises(CommandError, match="budget of gpu"):
        generate(folder, rows, own, max_new_tokens=3, budgets=Budgets(gpu=short), progress=seen.append)
    assert not seen


def test_keys_of_another_dtype_are_refused_by_name(saved, prompts, monkeypatch):
    """A model whose keys are not of its own dtype: a named error, and no thread is left."""
    import threading

    folder, _ = saved("llama")
    with OffloadedModel(folder, policy(2, 1)) as opened:
        attention = opened.skeleton.layers[1].self_attn
        forward = attention.forward

        def wrong(hidden_states, **kwargs):
            cache = kwargs["past_key_values"]
            original = cache.update
            cache.update = lambda k, v, number, *args: original(k.to(torch.float64), v.to(torch.float64), number)
            return forward(hidden_states, **kwargs)

        monkeypatch.setattr(attention, "forward", wrong)
        with pytest.raises(UnsupportedError, match="keys and values of layer 1 must be of"):
            opened.generate(prompts(2), max_new_tokens=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("batch", "nearflash-cache"))]
