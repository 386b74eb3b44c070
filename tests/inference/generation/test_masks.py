"""Masks over stored tokens: the logits of transformers' own cache with the same mask, or an unchanged cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, Phi3Config, Phi3ForCausalLM

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.inference import AttentionPolicy, NearflashCache, attach, open_engine
from nearflash.inference.cache.decoder import kv_shape_of

IDS = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(6))


@pytest.fixture
def both(make_model):
    """The same model with transformers' attention, and attached."""
    near = make_model()
    plain = copy.deepcopy(near)
    plain.set_attn_implementation("sdpa")
    return plain, near


@pytest.fixture
def flash(both):
    with open_engine(kv_shape_of(both[1].config), AttentionPolicy(), tokens=64, sequences=4) as engine:
        yield engine


@torch.no_grad()
def steps(model, cache, calls):
    """Logits of each call: ids, mask, places."""
    return [
        model(ids, attention_mask=mask, past_key_values=cache, **({} if places is None else {"position_ids": places}))
        .logits for ids, mask, places in calls
    ]  # fmt: skip


def mask_of(*rows):
    return torch.tensor([[int(letter) for letter in row] for row in rows])


def tree(columns, hidden):
    """Queries over all columns but those that are hidden from them."""
    mask = torch.ones(2, 1, len(hidden), columns, dtype=torch.bool).tril(columns - len(hidden))
    for query, places in enumerate(hidden):
        mask[..., query, places] = False
    return mask


CALLS = {
    "a text's end is hidden in the second turn": [
        (IDS[:, :5], mask_of("11111", "01111"), None), (IDS[:, 5:8], mask_of("11100111", "01111111"), None),
        (IDS[:, 8:9], mask_of("111001111", "011111111"), None),
    ],
    "tokens are evicted one by one": [
        (IDS[:, :5], mask_of("11111", "11111"), None), (IDS[:, 5:6], mask_of("101111", "110111"), None),
        (IDS[:, 6:7], mask_of("1001111", "1101011"), None),
    ],
    "hidden tokens are shown again": [
        (IDS[:, :5], mask_of("11111", "11111"), None), (IDS[:, 5:6], mask_of("100111", "111111"), None),
        (IDS[:, 6:8], mask_of("11111111", "11111111"), None),
    ],
    "padding in the middle, and on the right": [
        (IDS[:, :5], mask_of("00111", "11111"), None), (IDS[:, 5:9], mask_of("001111001", "111110111"), None),
        (IDS[:, 9:11], mask_of("00111100110", "11111011111"), None),
    ],
    "drafts of one place": [
        (IDS[:, :6], None, None), (IDS[:, 6:9], tree(9, [[7, 8], [6, 8], [6, 7]]), torch.tensor([[6, 6, 6]] * 2)),
        (IDS[:, 9:10], tree(10, [[6, 8]]), torch.tensor([[7]] * 2)),
    ],
    "a mask to be added": [
        (IDS[:, :4], None, None),
        (IDS[:, 4:6], (~tree(6, [[1, 5], [0]])).float() * torch.finfo(torch.float32).min, torch.tensor([[4, 5]] * 2)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_logits_are_those_of_transformers_own_cache(both, flash, name):
    plain, near = both
    wanted = steps(plain, DynamicCache(config=plain.config), CALLS[name])
    with NearflashCache(flash, near.config) as cache:
        for (_, mask, _), own, found in zip(CALLS[name], wanted, steps(near, cache, CALLS[name]), strict=True):
            real = torch.ones(own.shape[:2], dtype=torch.bool)
            if mask is not None and mask.ndim == 2:  # what padding gives in between is of no use
                real[:, :-1] = mask[:, -own.shape[1] :][:, :-1] == 1
            torch.testing.assert_close(found[real], own[real], rtol=0.02, atol=0.03)


def test_a_hidden_part_that_is_longer_than_a_read_is_hidden(both, flash, monkeypatch):
    """Groups come in several parts, of which some are hidden as a whole."""
    monkeypatch.setattr(type(flash), "logits_at_once", 1)
    plain, near = both
    ids = torch.randint(2, 97, (1, 60), generator=torch.Generator().manual_seed(7))
    mask = torch.ones(1, 60, dtype=torch.long)
    mask[:, :50] = 0
    calls = [(ids[:, :58], mask[:, :58] * 0 + 1, None), (ids[:, 58:], mask, None)]
    with NearflashCache(flash, near.config) as cache:
        found = steps(near, cache, calls)[1]
    torch.testing.assert_close(found, steps(plain, DynamicCache(config=plain.config), calls)[1], rtol=0.02, atol=0.03)


REJECTED = {
    "a bias": (tree(7, [[]]).float() - 1.5, "must hide a column or show it, not add a bias"),
    "heads": (torch.cat([tree(7, [[1]]), tree(7, [[2]])] * 2, 1), "must be the same for all heads"),
    "padding": (mask_of("1111111", "0111111"), "must hide padding as before, not show it in row 1"),
    "none": (None, "must be given again, not None: some columns are padding"),
    "short": (tree(6, [[]]), "must be of 2 rows, 1 queries and 7 columns"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_another_mask_is_rejected_before_anything_is_stored(both, flash, name):
    _, near = both
    mask, message = REJECTED[name]
    first, right = (IDS[:, :6], mask_of("111111", "001111"), None), (IDS[:, 6:7], mask_of("1111111", "0011111"), None)
    with NearflashCache(flash, near.config) as cache, NearflashCache(flash, near.config) as other:
        steps(near, cache, [first])
        with pytest.raises(UnsupportedError, match=message):
            steps(near, cache, [(IDS[:, 6:7], mask, torch.tensor([[6], [4]]))])
        assert cache.lengths == [6, 4] and cache.get_seq_length() == 6
        again, wanted = steps(near, cache, [right])[0], steps(near, other, [first, right])[1]
        assert torch.equal(again, wanted)


@pytest.mark.parametrize(("columns", "message"), [(7, "must hide a column or show it"), (5, "must match the size")])
def test_layers_that_a_rejected_call_has_left_apart_are_found(columns, message):
    """A layer of transformers' own, with a window, may have the call's tokens already, and cannot give them back."""
    kinds = ["sliding_attention", "full_attention"]
    torch.manual_seed(3)
    near = attach(Gemma2ForCausalLM(Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=None, sliding_window=4, layer_types=kinds,
    )).eval())  # fmt: skip
    with open_engine(kv_shape_of(near.config), AttentionPolicy(), tokens=64, sequences=2) as engine:
        with NearflashCache(engine, near.config) as cache:
            calls = [(IDS[:, :6], None, None)]
            steps(near, cache, calls)
            biased = torch.full((2, 1, 1, columns), -1.0)
            mask = {"full_attention": biased, "sliding_attention": biased[..., : 4 if columns == 7 else 7]}
            with pytest.raises((UnsupportedError, RuntimeError), match=message):
                steps(near, cache, [(IDS[:, 6:7], mask, torch.tensor([[6], [6]]))])
            with pytest.raises(UnsupportedError, match="cache must be rewound or reset: an earlier call ended between"):
                steps(near, cache, [(IDS[:, 6:8], None, None)])
            cache.reset()
            with NearflashCache(engine, near.config) as other:
                assert torch.equal(steps(near, cache, calls)[0], steps(near, other, calls)[0])


def test_an_engine_without_masks_rejects_them(both, flash, monkeypatch):
    _, near = both
    monkeypatch.setattr(type(flash), "takes_masks", False)
    with NearflashCache(flash, near.config) as cache:
        steps(near, cache, CALLS["hidden tokens are shown again"][:1])
        with pytest.raises(UnsupportedError, match="must show each token all before it on this engine"):
            steps(near, cache, CALLS["hidden tokens are shown again"][1:])
        assert cache.lengths == [5, 5]


def test_a_second_text_for_a_used_cache_is_rejected(both, flash):
    """transformers would compute nothing, or fail somewhere in the model."""
    _, near = both
    with NearflashCache(flash, near.config) as cache:
        near.generate(IDS[:, :6], max_new_tokens=4, past_key_values=cache)
        with pytest.raises(CommandError, match="input_ids must go on behind the 9 tokens that the cache holds"):
            near.generate(IDS[:, :9], max_new_tokens=4, past_key_values=cache)
        with pytest.raises(CommandError, match="behind the 9 tokens"):
            near.generate(IDS[:, :4], max_new_tokens=4, past_key_values=cache)
        with pytest.raises(CommandError, match="use_cache must be True with KV on flash"):
            near.generate(IDS, max_new_tokens=4, past_key_values=cache, use_cache=False)
        assert cache.lengths == [9, 9]


def test_drafts_from_the_prompt_behind_a_cache_that_holds_tokens_are_rejected(both, flash):
    """transformers passes all tokens again, behind those that are held: other tokens, with its own caches, too."""
    _, near = both
    with NearflashCache(flash, near.config) as cache:
        near.generate(IDS[:1, :6], max_new_tokens=4, past_key_values=cache)
        with pytest.raises(CommandError, match=r"the 9 tokens that the cache holds, but 1\d of 1\d are passed"):
            near.generate(IDS[:1], max_new_tokens=4, past_key_values=cache, prompt_lookup_num_tokens=3)
        assert cache.lengths == [9]


@pytest.fixture
def switching():
    """Positions change behind 8 tokens, and with them all K and V."""
    torch.manual_seed(3)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 8}  # fmt: skip
    config = Phi3Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=8, eos_token_id=None,
        rope_parameters=rope, sliding_window=None,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def test_a_model_that_leaves_its_cache_is_stopped(switching):
    """Phi-3 computes all again where its positions change, into a cache of its own, in memory."""
    near = attach(copy.deepcopy(switching))
    with open_engine(kv_shape_of(near.config), AttentionPolicy(), tokens=64, sequences=2) as engine:
        with NearflashCache(engine, near.config) as cache:
            with pytest.raises(UnsupportedError, match="model must keep to the cache that it is given, but after 8"):
                near.generate(IDS[:, :6], max_new_tokens=8, past_key_values=cache, do_sample=False)
        with NearflashCache(engine, near.config) as cache:  # behind the switch there is none
            own = switching.generate(IDS, max_new_tokens=8, do_sample=False)
            assert near.generate(IDS, max_new_tokens=8, past_key_values=cache, do_sample=False).tolist() == own.tolist()
            cache.check_complete(IDS.shape[1] + 7)
            with pytest.raises(UnsupportedError, match="it has 19 of 30 tokens"):
                cache.check_complete(30)


DIRECT = {
    "left": {"attention_mask": mask_of("001111", "111111")},
    "right": {"attention_mask": mask_of("111100", "111111")},
    "middle, in parts": {"attention_mask": mask_of("110011", "111111"), "prefill_chunk_size": 2},
    "of a row": {"attention_mask": mask_of("000000", "111111")},
    "positions": {"position_ids": torch.arange(3, 9).expand(2, 6)},
    "embeddings": {"inputs_embeds": True, "attention_mask": mask_of("001111", "111111")},
    "beams": {"attention_mask": mask_of("001111", "111111"), "num_beams": 3},
}


@pytest.mark.parametrize("name", DIRECT)
def test_generate_of_transformers_takes_what_it_takes_with_its_own_cache(both, name):
    plain, near = both
    options = {"input_ids": IDS[:, :6], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | DIRECT[name]
    if "inputs_embeds" in options:
        options["inputs_embeds"] = plain.get_input_embeddings()(options.pop("input_ids")).detach()
    own = plain.generate(**options, past_key_values=DynamicCache(config=plain.config))
    with open_engine(kv_shape_of(near.config), AttentionPolicy(), tokens=64, sequences=6) as engine:
        with NearflashCache(engine, near.config) as cache:
            assert near.generate(**options, past_key_values=cache).tolist() == own.tolist()
