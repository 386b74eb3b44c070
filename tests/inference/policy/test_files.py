"""Policy files: they hold what was written, belong to one model, and are read strictly; every shipped one is whole."""

import copy
import json
import random
import stat
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import NearflashError, OtherWeightsWarning, StateError
from nearflash.identity import weights_digests
from nearflash.inference.calibration.choose import UNIFORM, choose_policy, model_digest
from nearflash.inference.policy import files
from nearflash.inference.policy.files import PolicyFile, find_policy, own_folder, policy_files
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout, KvShape

SHAPE = KvShape(layers=3, kv_heads=2, dim=64)
ROPE = {"rope_type": "default", "rope_theta": 5e5}
LAYOUT = KvLayout(16, True, 1024, IndexFormat.INT4, 4096)


def config(**more):
    return LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, **more,
    )  # fmt: skip


def policy_file(weights=None):
    heads = {
        (layer, head): AttentionPolicy("sparf-page", 8 + layer, top_k=0.4, top_p=0.5 + head / 8, local_window=32)
        for layer in range(3) for head in range(2)
    }  # fmt: skip
    policy = AttentionPolicy("sparf-page", top_k=0.4, local_window=32, overrides=heads)
    return PolicyFile("some-model", model_digest(config()), policy, LAYOUT, 0.12, 0.001, "a test", weights or {})


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return own_folder()


def test_a_file_holds_what_was_written(tmp_path):
    path, own = tmp_path / "new" / "policy.json", policy_file()
    own.write(path)
    assert PolicyFile.read(path) == PolicyFile.read(path, SHAPE, own.digest) == own
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [one.name for one in path.parent.iterdir()] == [path.name]
    with pytest.raises(StateError, match="must be writable"):
        own.write(path / "below")


def test_the_digest_is_of_all_that_decides_k_and_v():
    """Of eleven keys it was: an epsilon or an activation was none of them."""
    same = [config(), config(torch_dtype="float16", use_cache=False, _name_or_path="/elsewhere", eos_token_id=7)]
    same[0].quantization_config = {"quant_method": "gguf"}
    assert len({model_digest(one) for one in same}) == 1
    others = [config(rope_parameters=ROPE), config(rms_norm_eps=1e-3), config(hidden_act="gelu"), config(my_key=1)]
    assert len({model_digest(one) for one in [*same, *others]}) == 5


def test_a_policy_of_other_weights_is_not_found_and_warns_where_it_is_named(home):
    torch.manual_seed(1)
    model = LlamaForCausalLM(config()).eval()
    path, dtypes = home / "mine.json", (torch.float32, torch.bfloat16)
    policy_file(weights_digests(model, dtypes)).write(path)
    for own in (model, model.to(torch.bfloat16)):
        assert choose_policy(config(), SHAPE, 2000, model=own)[1] == LAYOUT
        assert choose_policy(config(), SHAPE, 10, path, model=own)[1] == LAYOUT
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[3, 3] += 1
    policy, layout, sentence = choose_policy(config(), SHAPE, 2000, model=model)
    assert (policy, layout) == (UNIFORM, None) and f"as {path} was calibrated for other weights" in sentence
    with pytest.warns(OtherWeightsWarning, match=r"mine\.json was calibrated for other weights than the model's"):
        assert choose_policy(config(), SHAPE, 10, path, model=model)[1] == LAYOUT
    policy_file(weights_digests(model, dtypes)).write(home / "others.json")
    assert str(home / "others.json") in choose_policy(config(), SHAPE, 2000, model=model)[2]


def test_auto_takes_the_models_own_file_before_a_shipped_one(home):
    shape = SHAPE
    assert choose_policy(config(), shape, 1024)[0] == AttentionPolicy()
    policy, layout, sentence = choose_policy(config(), shape, 1025)
    assert (policy, layout) == (UNIFORM, None) and "there is no calibration of this model" in sentence
    policy_file().write(home / "mine.json")
    policy, layout, sentence = choose_policy(config(), shape, 1025)
    assert (policy, layout) == (policy_file().policy, LAYOUT)
    assert sentence == f"policy: {home / 'mine.json'}, calibrated for some-model"
    assert next(policy_files()) == home / "mine.json"
    assert choose_policy(config(), shape, 10, home / "mine.json")[0] == policy
    with pytest.raises(StateError, match="must be for this model's configuration, but it is for 'some-model'"):
        choose_policy(
            config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), shape, 10, home / "mine.json"
        )


def test_files_of_others_do_not_stop_auto_but_a_damaged_one_of_the_model_does(home):
    home.mkdir(parents=True)
    (home / "a.json").write_text("{")
    (home / "b.json").write_text("[]")
    assert find_policy(model_digest(config())) is None
    policy_file().write(home / "c.json")
    body = json.loads((home / "c.json").read_text())
    (home / "c.json").write_text(json.dumps(body | {"top_k": 7}))
    with pytest.raises(StateError, match=r"policy file .*c\.json must have a number as top_k, not 7"):
        find_policy(model_digest(config()))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 1}, "must have version 2, not 1, which names no weights"),
        ({"version": 3}, "must have version 2, not 3"),
        ({"weights": {"float32": 3}}, "must have text as the digests of weights"),
        ({"layout": []}, "must have a table as layout"),
        (
            {"layout": {"group_tokens": 16}},
            "must be an object of group_tokens, interleaved, block_tokens",
        ),
        ({"score_dims": [[8, 8], [9, 9], [10]]}, "as many numbers for each layer|shorter|longer"),
        ({"score_dims": [[8, 8], [9, 9], 10]}, "lists of as many numbers for each layer"),
        ({"score_dims": [[8, 8], [9, 9], [10, "10"]]}, "score_dims must be counts and top_p numbers, not '10'"),
        ({"score_dims": [[8, 8], [9, 9], [10, 65]]}, "score_dims must be at most 64"),
        ({"top_p": [[0.5, 1.5]] * 3}, "top_p must be 0, or below 1"),
        ({"top_p": [], "score_dims": []}, "of a layer and a KV head at least"),
        ({"top_p": [[0.5, 0.5]], "score_dims": [[8, 8]]}, "must be of 3 layers and 2 KV heads, not of 1 and 2"),
        ({"keep_tail": 1}, "must have true or false as keep_tail, not 1"),
        ({"more": 1}, "must be an object of version, model"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    path = tmp_path / "policy.json"
    policy_file().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StateError, match=rf"policy\.json.*({message})"):
        PolicyFile.read(path, SHAPE)


def test_random_changes_are_an_error_of_ours_or_another_sound_file(tmp_path):
    """Regression: wrong types ended in a raw TypeError, 107 of 120."""
    path, draw = tmp_path / "policy.json", random.Random(3)
    policy_file().write(path)
    text = path.read_text()
    whole, values = json.loads(text), (None, -1, 0, 1, 1e308, float("nan"), "", "INT4", [], {}, [[1]], True, 10**30)
    rejected = 0
    for turn in range(600):
        body = copy.deepcopy(whole)
        place = body if draw.random() < 0.5 else body["layout"]
        if draw.random() < 0.3:
            rows = body[draw.choice(["score_dims", "top_p"])]
            rows[draw.randrange(3)][draw.randrange(2)] = draw.choice(values)
        elif draw.random() < 0.2:
            del place[draw.choice(list(place))]
        else:
            place[draw.choice(list(place))] = draw.choice(values)
        changed = json.dumps(body)
        if turn % 10 == 0:
            cut = draw.randrange(len(text))
            changed = text[:cut] + draw.choice(["", "[" * 5000, "\0", "9"]) + text[cut + 1 :]
        path.write_text(changed)
        try:
            found = PolicyFile.read(path, SHAPE)
        except NearflashError:
            rejected += 1
        else:
            assert len(found.policy.overrides) == 6
    assert rejected > 300


@pytest.mark.parametrize("path", sorted(files._SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_policies_fit_their_layout(path):
    own = PolicyFile.read(path)
    assert {each.mode for each in own.policy.overrides.values()} == {"sparf-page"}
    assert all(0.5 <= each.top_p < 1 and 1 <= each.score_dims <= 128 for each in own.policy.overrides.values())
    assert own.layout.page_bytes == 4096 and 0 < own.flash_fraction < 0.2


def test_policy_files_load_no_torch():
    code = "import sys, nearflash.inference.policy.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
