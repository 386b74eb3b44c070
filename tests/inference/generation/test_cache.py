import copy
import threading
import time

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from nearflash.abi.errors import CommandError, NonFiniteError, ShapeError, StorageFullError, UnsupportedError
from nearflash.inference.cache.cache import NearflashCache

PROMPTS = [
    "The committee met in the spring of that year and decided",
    "Water",
    "In the first chapter the author describes how the engine was built, and why it took so long",
    "He said that",
    "A short history of the town: it was founded by",
    "The results of the experiment show that the temperature",
    "and",
    "On the second day of the journey the ship",
]


@pytest.fixture
def batch(tokenizer):
    """Eight prompts of unequal length, padded on the left."""
    return tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)


def tokens_of(model, inputs, cache, new=6, **options):
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, past_key_values=cache, **settings)[:, -new:].tolist()


def random_inputs(lengths, seed=3):
    """(batch, longest) random tokens, padded on the left to the longest."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 97, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[int(t >= max(lengths) - n) for t in range(max(lengths))] for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


class RoundedCache(DynamicCache):
    """transformers' own, which attends in decode to K and V rounded to fp16."""

    def update(self, key, value, layer, *args, **kwargs):
        prefill = not self.get_seq_length(layer)
        k, v = super().update(key.half().to(key), value.half().to(value), layer, *args, **kwargs)
        return (key, value) if prefill else (k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_eight_unequal_prompts_give_the_tokens_of_the_models_own_cache(doclm, batch, engine, dtype):
    model = copy.deepcopy(doclm).to(dtype)
    own = tokens_of(model, batch, RoundedCache(config=model.config))
    with NearflashCache(engine) as cache:
        found = tokens_of(model, batch, cache)
        assert found == own or dtype is torch.bfloat16
        lengths = batch["attention_mask"].sum(1).tolist()
        assert [engine.kv(row, 5)[0].shape for row in cache.sequences] == [(2, n + 5, 128) for n in lengths]
    assert not engine.stored
    # Eight bits of significand: which of two almost equal logits is larger depends on the processor's own kernels.
    for ids, mask, here, there in zip(batch["input_ids"], batch["attention_mask"], found, own, strict=True):
        if here != there:
            at = next(place for place, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
            context = torch.cat([ids[mask.bool()], torch.tensor(there[:at], dtype=ids.dtype)])
            with torch.no_grad():
                logits = model(context[None]).logits[0, -1].float()
            gap = (logits[here[at]] - logits[there[at]]).abs()
            assert gap <= 4 * torch.finfo(dtype).eps * logits.abs().max(), (here, there)


def test_grouped_queries_go_to_their_kv_head(make_model, make_engine):
    model, engine = make_model(heads=6, kv_heads=2), make_engine(2)
    inputs = random_inputs([9, 4, 7])
    assert tokens_of(model, inputs, NearflashCache(engine)) == tokens_of(
        model, inputs, DynamicCache(config=model.config)
    )


def test_stored_values_are_the_models_own_in_fp16(make_model, make_engine):
    model, engine = make_model(dtype=torch.float16), make_engine(2)
    inputs = random_inputs([5, 3])
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=own)
        cache = NearflashCache(engine)
        model(**inputs, past_key_values=cache)
    cache.behind.wait()
    for row, (sequence, length) in enumerate(zip(cache.sequences, (5, 3), strict=True)):
        for layer in range(2):
            k, v = engine.kv(sequence, layer)
            assert np.array_equal(k, own.layers[layer].keys[row, :, -length:].numpy())
            assert np.array_equal(v, own.layers[layer].values[row, :, -length:].numpy())


def test_a_prompt_of_one_token_is_decode(make_model, make_engine):
    model, inputs = make_model(), random_inputs([1, 1])
    assert tokens_of(model, inputs, NearflashCache(make_engine(2))) == tokens_of(
        model, inputs, DynamicCache(config=model.config)
    )


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 3}])
def test_a_second_turn_adds_several_tokens(make_model, make_engine, options):
    """The conversation so far is stored; of the new tokens some are padding."""
    model, inputs = make_model(), random_inputs([6, 4])
    follow, seen = torch.tensor([[5, 6, 7, 11], [0, 0, 9, 10]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])

    def second_turn(cache, **options):
        first = torch.tensor(tokens_of(model, inputs, cache))
        ids = torch.cat([inputs["input_ids"], first, follow], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(first), seen], 1)
        return tokens_of(model, {"input_ids": ids, "attention_mask": mask}, cache, **options)

    engine = make_engine(2)
    cache = NearflashCache(engine)
    assert second_turn(cache, **options) == second_turn(RoundedCache(config=model.config))
    assert cache.lengths == [6 + 6 + 4 + 5, 4 + 6 + 2 + 5]
    assert [engine.kv(sequence, 1)[0].shape[1] for sequence in cache.sequences] == cache.lengths


def test_padding_that_comes_one_by_one_is_not_stored(make_model, make_engine):
    model, engine, inputs = make_model(), make_engine(2), random_inputs([6, 2])
    cache = NearflashCache(engine)
    assert tokens_of(model, inputs, cache, prefill_chunk_size=1) == tokens_of(
        model, inputs, DynamicCache(config=model.config)
    )
    assert engine.kv(cache.sequences[1], 0)[0].shape[1] == 2 + 5


def test_a_reset_cache_takes_another_batch(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    cache = NearflashCache(engine)
    tokens_of(model, random_inputs([4, 2]), cache)
    cache.reset()
    assert not engine.stored and cache.get_seq_length() == 0
    inputs = random_inputs([3, 5, 2])
    assert tokens_of(model, inputs, cache) == tokens_of(model, inputs, DynamicCache(config=model.config))


def logits_of(model, ids, cache):
    """Of the last of these tokens, behind those of the cache: its padding, on the left, stays hidden."""
    columns = cache.get_seq_length()
    lengths = getattr(cache, "lengths", [columns] * len(ids))
    seen = torch.tensor([[0] * (columns - length) + [1] * (length + ids.shape[1]) for length in lengths])
    with torch.no_grad():
        return model(ids, attention_mask=seen, past_key_values=cache).logits[:, -1]


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    inputs, ids = random_inputs([6, 3]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    with NearflashCache(engine) as cache, NearflashCache(engine) as other:
        for each in (cache, other):
            with torch.no_grad():
                model(**inputs, past_key_values=each)
        logits_of(model, ids, cache)
        cache.crop(-2)
        logits_of(model, ids[:, :1], other)
        assert cache.lengths == other.lengths == [7, 4] and cache.get_seq_length() == 7 and cache.is_croppable
        assert torch.equal(logits_of(model, ids[:, 1:2], cache), logits_of(model, ids[:, 1:2], other))
        for wrong in (1, -9):
            with pytest.raises(CommandError, match=rf"tokens_to_remove must be -8 to 0, not {wrong}"):
                cache.crop(wrong)
        cache.crop(-8)
        assert cache.sequences == [] and cache.get_seq_length() == 0
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        assert cache.lengths == [6, 3]


def test_rows_are_repeated_selected_and_reordered_without_copies_of_what_is_stored(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    with NearflashCache(engine) as cache:
        with torch.no_grad():
            model(**random_inputs([6, 3]), past_key_values=cache)
        first, second = cache.batch_sequences(2)
        cache.batch_repeat_interleave(2)
        assert cache.lengths == [6, 6, 3, 3] and len(set(cache.sequences)) == 4
        cache.batch_select_indices(torch.tensor([True, False, True, False]))
        assert cache.sequences == [first, second] and sorted(engine.stored) == [first, second]
        cache.reorder_cache(torch.tensor([1, 1]))
        assert cache.lengths == [3, 3] and cache.sequences[0] == second and first not in engine.stored
        assert cache.get_max_length() == cache.get_max_cache_shape() == cache.layers[0].get_max_cache_shape() == -1
        assert not cache.is_compileable
    assert not engine.stored


def test_a_copy_goes_on_by_itself(make_model, make_engine):
    """As prompts are used again in transformers: one prefill, a copy for each question."""
    model, engine = make_model(), make_engine(2)
    inputs = random_inputs([7])
    with NearflashCache(engine) as prompt:
        with torch.no_grad():
            model(**inputs, past_key_values=prompt)
        copies = [copy.deepcopy(prompt) for _ in range(2)]
        answers = [logits_of(model, torch.tensor([[token]]), each) for token, each in zip((5, 6), copies, strict=True)]
        assert prompt.lengths == [7] and copies[0].lengths == copies[1].lengths == [8]
        for token, answer in zip((5, 6), answers, strict=True):
            own = DynamicCache(config=model.config)
            logits_of(model, inputs["input_ids"], own)
            torch.testing.assert_close(answer, logits_of(model, torch.tensor([[token]]), own), rtol=1e-2, atol=1e-2)
        for each in copies:
            each.reset()
        assert sorted(engine.stored) == prompt.sequences


def test_sequences_that_the_engine_holds_become_a_cache(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    inputs, follow = random_inputs([6, 3]), torch.tensor([[5, 6], [7, 8]])
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.int64)], 1)
    with NearflashCache(engine) as cache:
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            cache.behind.wait()
            sequences = [engine.fork(sequence) for sequence in cache.sequences]
            one = model(follow, attention_mask=mask, past_key_values=cache).logits
    with NearflashCache.of_sequences(engine, model.config, sequences, [6, 3]) as again, torch.no_grad():
        assert torch.equal(model(follow, attention_mask=mask, past_key_values=again).logits, one)
    assert not engine.stored


@pytest.mark.parametrize("new", [1, 3])
def test_a_call_that_fails_is_undone_and_can_be_repeated(make_model, make_engine, new):
    """The store is full in the second layer: the first one has the tokens already."""
    model, engine = make_model(), make_engine(2)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])[:, :new]
    with NearflashCache(engine) as cache:
        with torch.no_grad():
            model(**random_inputs([6, 3]), past_key_values=cache)
        cache.behind.wait()
        engine.room = 2 * 2 * 16 * new
        with pytest.raises(StorageFullError, match="flash must have room"):
            logits_of(model, ids, cache)
        cache.rewind()
        assert cache.lengths == [6, 3] and cache.get_seq_length() == 6
        assert [engine.kv(row, layer)[0].shape[1] for row in cache.sequences for layer in (0, 1)] == [6, 6, 3, 3]
        engine.room = 1 << 20
        again = logits_of(model, ids, cache)
        with NearflashCache(engine) as other:
            with torch.no_grad():
                model(**random_inputs([6, 3]), past_key_values=other)
            assert torch.equal(logits_of(model, ids, other), again)


def test_a_first_call_that_fails_is_undone(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    engine.room = 100
    cache = NearflashCache(engine)
    with torch.no_grad(), pytest.raises(StorageFullError):
        model(**random_inputs([4, 2]), past_key_values=cache)
        cache.behind.wait()
    cache.rewind()
    assert not engine.stored and cache.get_seq_length() == 0


def test_another_batch_size_is_refused(make_model, make_engine):
    model = make_model()
    cache = NearflashCache(make_engine(2))
    tokens_of(model, random_inputs([4, 2]), cache)
    with torch.no_grad(), pytest.raises(ShapeError, match="batch must have 2 sequences as before, not 3"):
        model(torch.tensor([[1], [2], [3]]), past_key_values=cache)


def test_another_attention_function_is_refused(make_model, make_engine):
    """In the first call by the second layer, in decode by the first."""
    model, inputs = make_model(), random_inputs([4, 2])
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"use nearflash\.inference\.attach"):
        one_layer = make_model(layers=1)
        one_layer.set_attn_implementation("sdpa")
        cache = NearflashCache(make_engine(2))
        one_layer(**inputs, past_key_values=cache)
        one_layer(torch.tensor([[1], [2]]), past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"another attention function \(it asks for 'shape'\)"):
        tokens_of(model, random_inputs([1, 1]), NearflashCache(make_engine(2)))


def test_values_beyond_fp16_are_an_error(make_model, make_engine):
    model = make_model(dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight *= 1e6
    with pytest.raises(NonFiniteError, match=r"value of layer 1 must be finite in fp16 \(at most 65504\), not"):
        tokens_of(model, random_inputs([4, 2]), NearflashCache(make_engine(2)))


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["at-once", "late"])
def test_an_error_behind_the_computation_is_raised(make_model, make_engine, monkeypatch, seconds):
    model, engine = make_model(), make_engine(2)
    engine.room, append = 100, engine.append
    monkeypatch.setattr(engine, "append", lambda *tokens: time.sleep(seconds) or append(*tokens))
    cache = NearflashCache(engine)
    with pytest.raises(StorageFullError, match="flash must have room"):
        tokens_of(model, random_inputs([4, 2]), cache)
    # As the first call met it: at its end, or between two layers, which then hold different tokens.
    with pytest.raises((StorageFullError, UnsupportedError), match=r"must have room|must be rewound or reset"):
        logits_of(model, torch.tensor([[1], [2]]), cache)
    cache.reset()
    assert not engine.stored


def test_a_model_that_is_being_compiled_is_refused(make_model, make_engine, monkeypatch):
    model = make_model(layers=1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"must be used without torch\.compile"):
        model(**random_inputs([4, 2]), past_key_values=NearflashCache(make_engine(2)))


@pytest.mark.full
def test_compilation_is_refused(make_model, make_engine):
    model = torch.compile(make_model(layers=1), backend="eager")
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"must be used without torch\.compile"):
        model(**random_inputs([4, 2]), past_key_values=NearflashCache(make_engine(2)))


def test_the_next_layer_computes_while_values_are_appended(make_model, make_engine, monkeypatch):
    """Values of the first layer are appended only when the second one has begun."""
    model, engine, begun = make_model(), make_engine(2), threading.Event()
    append, waited = type(engine).append, []

    def slow(self, sequence, layer, k, v):
        if layer == 0:
            waited.append(begun.wait(10))
        append(self, sequence, layer, k, v)

    monkeypatch.setattr(type(engine), "append", slow)
    model.model.layers[1].register_forward_pre_hook(lambda *_: begun.set())
    with torch.no_grad(), NearflashCache(engine) as cache:
        model(**random_inputs([4, 2]), past_key_values=cache)
        cache.behind.wait()
        assert waited == [True, True] and engine.kv(cache.sequences[0], 0)[0].shape == (2, 4, 16)
