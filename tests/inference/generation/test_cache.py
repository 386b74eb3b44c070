import copy
import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from nearflash.abi.errors import NonFiniteError, ShapeError, StorageFullError, UnsupportedError
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
        assert tokens_of(model, batch, cache) == own
        lengths = batch["attention_mask"].sum(1).tolist()
        assert [engine.kv(row, 5)[0].shape for row in cache.sequences] == [(2, n + 5, 128) for n in lengths]
    assert not engine.stored


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


def test_more_tokens_follow_one_by_one(make_model, make_engine):
    """A second turn: the conversation so far is stored, the new tokens go in with prefill_chunk_size=1."""
    model, inputs = make_model(), random_inputs([6, 4])
    follow = torch.tensor([[5, 6, 7], [8, 9, 10]])

    def second_turn(cache, **options):
        first = torch.tensor(tokens_of(model, inputs, cache))
        ids = torch.cat([inputs["input_ids"], first, follow], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 9, dtype=torch.int64)], 1)
        return tokens_of(model, {"input_ids": ids, "attention_mask": mask}, cache, **options)

    own = second_turn(DynamicCache(config=model.config))
    assert second_turn(NearflashCache(make_engine(2)), prefill_chunk_size=1) == own
    with pytest.raises(
        UnsupportedError, match=r"without 4 new tokens at once after 11 stored ones: pass prefill_chunk"
    ):
        second_turn(NearflashCache(make_engine(2)))


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


def test_beams_and_crops_and_copies_are_refused(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    inputs = random_inputs([4, 2])
    with pytest.raises(UnsupportedError, match="KV on flash must be used without reordering, which beam search needs"):
        tokens_of(model, inputs, NearflashCache(engine), num_beams=2)
    with NearflashCache(engine) as cache:
        tokens_of(model, inputs, cache)
        assert not cache.is_croppable and not cache.is_compileable
        with pytest.raises(UnsupportedError, match="without crop: generate without an assistant"):
            cache.crop(-1)
        with pytest.raises(UnsupportedError, match="without a copy"):
            copy.deepcopy(cache)
        with pytest.raises(UnsupportedError, match="without repeated rows"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(UnsupportedError, match="without a selection of rows"):
            cache.batch_select_indices(torch.tensor([0]))
        assert cache.get_max_length() == cache.get_max_cache_shape() == cache.layers[0].get_max_cache_shape() == -1


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


def test_an_error_behind_the_computation_is_raised(make_model, make_engine):
    model, engine = make_model(), make_engine(2)
    engine.room = 100
    cache = NearflashCache(engine)
    with pytest.raises(StorageFullError, match="flash must have room"):
        tokens_of(model, random_inputs([4, 2]), cache)
    with torch.no_grad(), pytest.raises(StorageFullError):
        model(torch.tensor([[1], [2]]), past_key_values=cache)
    cache.reset()
    assert not engine.stored


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
