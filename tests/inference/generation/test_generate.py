import signal
import threading
import time

import pytest

from nearflash.abi.errors import CommandError, DeviceError
from nearflash.inference.generate import generate
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import open_engine

PROMPTS = ["The committee met in the spring of that year and", "Water", "He said that", "A short history of the town:"]
LONG = [PROMPTS[0], "In the spring the river rose above the lower town, and the council met again. " * 60]
"""The second one's K and V do not stay in memory."""


@pytest.fixture(scope="module")
def dense(doclm, tokenizer):
    """What the host gives."""
    with open_engine(kv_shape(doclm), AttentionPolicy(), tokens=40, sequences=4) as engine:
        return generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=6)


@pytest.fixture(scope="module")
def dense_long(doclm, tokenizer):
    """What the host gives of LONG."""
    with open_engine(kv_shape(doclm), AttentionPolicy(), tokens=1600, sequences=2) as engine:
        return generate(doclm, tokenizer, LONG, engine, max_new_tokens=6)


def test_texts_figures_and_progress(doclm, tokenizer, engine, dense):
    told = []
    done = generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=6, progress=told.append)
    assert done.tokens == dense.tokens
    assert done.texts == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in done.tokens]
    assert [one.step for one in told] == list(range(1, 7)) and {one.steps for one in told} == {6}
    assert told[-1].remaining_s == 0 < told[2].remaining_s and told[-1].tokens_per_s > 0
    assert told[-1].flash_bytes_per_token == done.flash_bytes_per_token
    assert done.counters.heads == 5 * 6 * 2 * 4
    assert done.flash_bytes_per_token == sum(done.counters.flash_bytes.values()) / 20
    assert done.prefill_s > 0 and done.decode_s > 0 and done.tokens_per_s == pytest.approx(20 / done.decode_s)
    assert not engine.stored
    again = generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=6)
    assert again.counters.flash_bytes == done.counters.flash_bytes


def test_the_model_device_gives_the_tokens_of_the_host(doclm, tokenizer, dense):
    shape = kv_shape(doclm)
    with open_engine(shape, AttentionPolicy(), tokens=40, sequences=4, device="model:attend-tiny") as engine:
        assert generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=6).tokens == dense.tokens


def test_two_devices_give_the_tokens_of_one(doclm, tokenizer, dense_long):
    with open_engine(kv_shape(doclm), AttentionPolicy(), tokens=1600, sequences=2, num_devices=2) as engine:
        done = generate(doclm, tokenizer, LONG, engine, max_new_tokens=6)
        asked = [one.counters.flash_bytes["token"] for one in engine.engines]
    assert done.tokens == dense_long.tokens and asked[0] == asked[1] > 0
    assert done.counters.flash_bytes == dense_long.counters.flash_bytes


@pytest.mark.parametrize("mode", ["sparq", pytest.param("sparf", marks=pytest.mark.full), "sparf-page"])
def test_all_dims_and_tokens_are_dense(doclm, tokenizer, dense_long, mode):
    """The approximate score then decides nothing."""
    policy = AttentionPolicy(mode, score_dims=1.0, top_k=1.0)
    with open_engine(kv_shape(doclm), policy, tokens=1600, sequences=2) as engine:
        assert generate(doclm, tokenizer, LONG, engine, max_new_tokens=6).tokens == dense_long.tokens


def test_mini_batches_compute_while_others_are_attended_to(doclm, tokenizer, engine, dense, monkeypatch):
    """Same tokens; and attention to one mini-batch waits until the model computes for another, which it does."""
    attend, turn = type(engine).attend, threading.Lock()
    busy, computed = threading.Event(), threading.Event()
    overlaps = []

    def slow(self, *arguments):
        with turn:
            computed.clear()
            busy.set()
            overlaps.append(computed.wait(0.1))
            busy.clear()
            return attend(self, *arguments)

    hooks = [
        layer.mlp.register_forward_hook(lambda *_: computed.set() if busy.is_set() else None)
        for layer in doclm.model.layers
    ]
    monkeypatch.setattr(type(engine), "attend", slow)
    try:
        done = generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=4, mini_batches=2)
    finally:
        for hook in hooks:
            hook.remove()
    assert done.tokens == [tokens[:4] for tokens in dense.tokens] and any(overlaps)


def test_the_first_end_of_text_token_ends_a_sequence(doclm, tokenizer, engine, dense, monkeypatch):
    end = dense.tokens[0][2]
    monkeypatch.setattr(doclm.generation_config, "eos_token_id", end)
    done = generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=6)
    for tokens, own in zip(done.tokens, dense.tokens, strict=True):
        assert tokens == (own[: own.index(end) + 1] if end in own else own)


def test_an_engines_error_frees_the_sequences(doclm, tokenizer, engine):
    engine.broken = True
    with pytest.raises(DeviceError, match="device must answer"):
        generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=6, mini_batches=2)
    assert not engine.stored


def test_the_first_interrupt_ends_it(doclm, tokenizer, engine):
    """It had been heard when all tokens were there."""
    told = []

    def report(progress):
        told.append(progress.step)
        if progress.step == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)

    with pytest.raises(KeyboardInterrupt):
        generate(doclm, tokenizer, PROMPTS[:1], engine, max_new_tokens=20, progress=report)
    assert told[-1] <= 5 and not engine.stored


def test_prompts_batches_and_templates_are_checked(doclm, tokenizer, engine):
    with pytest.raises(CommandError, match="prompts must be at least one"):
        generate(doclm, tokenizer, [], engine)
    with pytest.raises(CommandError, match="prompts must have a token at least"):
        generate(doclm, tokenizer, ["", ""], engine)
    with pytest.raises(CommandError, match="max_new_tokens must be 1 or more, not 0"):
        generate(doclm, tokenizer, PROMPTS, engine, max_new_tokens=0)
    assert not engine.stored
    with pytest.raises(CommandError, match="mini_batches must be 1 to 4, the prompts, not 5"):
        generate(doclm, tokenizer, PROMPTS, engine, mini_batches=5)
    with pytest.raises(CommandError, match="chat must be False for a model whose tokenizer has no template, not True"):
        generate(doclm, tokenizer, PROMPTS, engine, chat=True)
