"""`nearflash train` and what it is made of: the loss falls, a run that was stopped goes on with the same bits."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nearflash import training
from nearflash.abi.errors import CommandError, StateError
from nearflash.cli import main as cli
from nearflash.training import NearStorageAdamW, TopK
from nearflash.training.finetune import Data, fine_tune, load_model, load_tokens
from nearflash.training.generators import generator_states, restore_generators, seed_generators

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of two layers, without a tokenizer, and 2,000 tokens that repeat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path / "model")
    np.save(path / "tokens.npy", np.tile(np.arange(50, dtype=np.uint16), 40))
    np.save(path / "long.npy", np.tile(np.arange(50, dtype=np.uint16), 60))
    return path


@pytest.fixture
def train(folder, tmp_path, capsys):
    def run(*more, steps=4, state="state", data="tokens.npy"):
        code = cli.main([
            "train", "--model", str(folder / "model"), "--data", str(folder / data), "--path", str(tmp_path / state),
            "--seq-length", "20", "--lr", "0.01", "--steps", str(steps), *more,
        ])  # fmt: skip
        return code, capsys.readouterr().err

    return run


def saved(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_it_learns_and_reports(train, tmp_path):
    code, err = train("--trace", str(tmp_path / "trace.json"), steps=20)
    lines = err.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step ")]
    assert code == 0 and losses[-1] < losses[0] - 0.3
    assert "tokens/s" in lines[0] and any("20 steps to step 20 of" in line for line in lines)
    assert "gradients down 2.00, parameters up 2.00, flash read 12" in err and "would be 24" in err
    assert "the last step waited for:" in lines[-1]
    assert {"step", "commit"} <= {
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_stopped_and_resumed(train, tmp_path, dtype):
    train("--dtype", dtype, "--save", str(tmp_path / "whole"), state="a")
    train("--dtype", dtype, state="b", steps=2)
    code, err = train("--dtype", dtype, "--save", str(tmp_path / "resumed"), state="b")
    assert code == 0 and "resuming from step 2" in err
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["use_cache"] is True
    whole, resumed = saved(tmp_path / "whole"), saved(tmp_path / "resumed")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_dropout_goes_on_where_it_stopped(train, folder, tmp_path):
    """Once a run that resumed dropped what the first steps had dropped: 4 steps differed from 2 + 2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 97, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "gpt2")
    common = ["--model", str(tmp_path / "gpt2"), "--dtype", "fp32"]
    train(*common, "--save", str(tmp_path / "whole"), state="a")
    train(*common, state="b", steps=2)
    torch.rand(5), np.random.rand(5), random.random()  # noqa: NPY002
    train(*common, "--save", str(tmp_path / "resumed"), state="b")
    train(*common, "--save", str(tmp_path / "seeded"), "--seed", "1", state="c")
    whole, resumed, seeded = (saved(tmp_path / name) for name in ("whole", "resumed", "seeded"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not all(torch.equal(whole[name], seeded[name]) for name in whole)


def test_generators_come_back_through_json():
    def draw():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]  # noqa: NPY002

    seed_generators(7)
    # Both keep a second normal number for the next call.
    draw(), np.random.randn(), random.gauss(0, 1)  # noqa: NPY002
    states = json.loads(json.dumps(generator_states()))
    assert len(json.dumps(states)) < 20_000
    expected = draw()
    seed_generators(8)
    restore_generators(states)
    assert draw() == expected
    before = generator_states()
    for change in ({"torch": "AAAA"}, {"python": [3, "AAAA", None]}, {"numpy": None}, {"cuda": [3]}):
        with pytest.raises(StateError, match="states of generators must be as they were stored"):
            restore_generators(states | change)
    assert generator_states() == before


def test_sequences_longer_than_the_model_has_positions(train, tmp_path):
    code, err = train("--seq-length", "3000")
    assert code == 2 and err.splitlines()[-1].startswith("nearflash: data must have at least 3000 tokens")
    code, err = train("--seq-length", "2049", data="long.npy")
    assert code == 2 and "seq_length must be at most 2048, the positions of the model, not 2049" in err
    code, err = train("--seq-length", "1")
    assert code == 2 and "seq_length must be at least 2" in err


def test_a_state_of_another_model_or_other_data_is_not_resumed(train, folder, tmp_path):
    """Of the same shapes and the same length: once the earlier model was trained on and saved."""
    train(steps=1)
    np.save(tmp_path / "other.npy", np.tile(np.arange(50, dtype=np.uint16)[::-1], 40))
    code, err = train("--data", str(tmp_path / "other.npy"))
    assert code == 2 and "data must be that of" in err
    model, _ = load_model(folder / "model", "fp32")
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    model.save_pretrained(tmp_path / "other")
    code, err = train("--model", str(tmp_path / "other"))
    assert code == 2 and "model must be the one that the run on" in err
    config = json.loads((folder / "model" / "config.json").read_text())
    shutil.copytree(folder / "model", tmp_path / "eps")
    (tmp_path / "eps" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    code, err = train("--model", str(tmp_path / "eps"))
    assert code == 2 and "model must be the one that the run on" in err
    assert train()[0] == 0


def test_data_that_is_no_regular_file_or_no_array(train, tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    np.savez(tmp_path / "several.npz", a=np.arange(9))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    (tmp_path / "huge.npy").write_bytes(
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(118)
    )
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("pipe", "several", "huge", "empty"):
        code, err = train("--data", str(tmp_path / f"{name}.npy"))
        assert code == 2 and "nearflash: data must be" in err.splitlines()[-1] and "Traceback" not in err, (name, err)


def test_skipped_steps_take_their_batches_across_a_resume(folder, tmp_path):
    """Once a run that resumed began again with the batch of its number of committed steps."""
    model, _ = load_model(folder / "model", "fp32")
    data = Data(load_tokens(folder / "tokens.npy", None, 97), 20, 2, 0)
    infinite = 1

    def forward(module, _, output):
        return replace(output, loss=output.loss * (float("inf") if len(seen) == infinite else 1.0))

    def inputs(module, _, keywords):
        seen.append(keywords["input_ids"].clone())

    seen: list[torch.Tensor] = []
    hooks = [model.register_forward_pre_hook(inputs, with_kwargs=True), model.register_forward_hook(forward)]
    for steps, resume in ((2, False), (4, True)):
        options = {"path": tmp_path / "state", "resume": resume, "loss_scale": "dynamic"}
        with NearStorageAdamW(model.named_parameters(), lr=1e-3, **options) as optimizer:
            list(fine_tune(model, data, optimizer, steps))
    for hook in hooks:
        hook.remove()
    assert len(seen) == 5 and all(torch.equal(ids, data.at(number)) for number, ids in enumerate(seen))


def test_save_onto_a_file_is_refused_before_training(train, tmp_path):
    """Once it trained, saved nothing and exited with 0."""
    (tmp_path / "model.bin").write_text("kept")
    code, err = train("--save", str(tmp_path / "model.bin"))
    assert code == 2 and "--save must name a folder, not the file" in err
    assert (tmp_path / "model.bin").read_text() == "kept" and not (tmp_path / "state").exists()


def test_save_onto_the_model_is_refused_before_training(train, folder, tmp_path):
    """Once it took the place of the model that the run needs to resume, rounded to bf16."""
    (tmp_path / "link").symlink_to(folder / "model")
    for target in (folder / "model", tmp_path / "link"):
        code, err = train("--save", str(target))
        assert code == 2 and "--save must name another folder than --model" in err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("option", "target", "named"),
    [("--save", "file/out", "file"), ("--trace", "file/out", "file/out"), ("--trace", "none/t.json", "none/t.json")],
)
def test_places_that_cannot_be_written_are_named_before_training(train, tmp_path, option, target, named):
    """Once training ended with the error, and saved nothing."""
    (tmp_path / "file").write_text("")
    code, err = train(option, str(tmp_path / target))
    assert code == 2 and f"{option} must be a place that can be written, but '{tmp_path / named}' is none" in err
    assert not (tmp_path / "state").exists()


def test_options_reach_the_optimizer(train, tmp_path):
    code, err = train(
        "--optimizer", "lion", "--dtype", "fp16", "--topk", "0.1", "--overlap", "backward",
        "--max-grad-norm", "0.5", "--topk-unsaved", "--topk-warmup", "0", steps=2,
    )  # fmt: skip
    moved = {name: float(err.split(f"{name} ")[1].split(",")[0].split(";")[0]) for name in ("down", "read", "written")}
    # p, m of Lion are written; where the norm was clipped, up to once more in vain.
    assert code == 0 and moved["down"] < 1.2 and 8 <= moved["written"] < 16.8, err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], TopK(0.1)),
        (["--topk-residual", "fp32", "--topk-values", "fp16"], TopK(0.1, residual="fp32", value_format="fp16")),
        (["--topk-residual", "none", "--topk-warmup", "3"], TopK(0.1, feedback=False, warmup_steps=3)),
        (["--topk-unsaved"], TopK(0.1, saved=False)),
    ],
)
def test_choices_of_topk(train, monkeypatch, options, expected):
    found = []
    monkeypatch.setattr(training, "NearStorageAdamW", lambda *_, **given: found.append(given["compression"]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("--topk", "0.1", *options)
    assert found == [expected]


def test_a_split_master_reads_less_and_wants_bf16(train, tmp_path):
    code, err = train("--master", "split", "--state-format", "mx8", steps=2)
    assert code == 0 and 4 < float(err.split("flash read ")[1].split(",")[0]) < 5, err
    code, err = train("--master", "split", "--dtype", "fp32", "--path", str(tmp_path / "other"))
    assert code == 2 and "--dtype must be bf16, not fp32, with --master split" in err
    assert not (tmp_path / "other").exists()


def test_choices_of_topk_want_topk(train):
    assert "ratio must be in (0, 1], not 0" in train("--topk", "0")[1]  # once as if it had not been given


def test_two_devices(train, tmp_path):
    code, _ = train("--path", str(tmp_path / "one"), str(tmp_path / "two"), steps=1)
    assert code == 0 and (tmp_path / "one").exists() and (tmp_path / "two").exists()


def test_what_does_not_fit_is_named(train, folder, tmp_path):
    train(steps=1)
    for arguments, message in [
        (("--no-resume",), "must not exist yet"),
        (("--seed", "9"), "data must be that of"),
        (("--optimizer", "adam"), "optimizer must be 'adamw', which made the state of"),
        (("--data", str(folder / "none.npy")), "data must be a readable text or .npy file"),
        (("--data", str(folder / "model" / "config.json")), "data must be tokens (.npy), not text"),
        (("--model", str(tmp_path)), "model must be smollm2 or a folder with a config.json"),
    ]:
        code, err = train(*arguments)
        assert code == 2 and message in err.splitlines()[-1] and "Traceback" not in err, err


def test_numbers_that_mean_nothing(train, capsys):
    for option, value in [("--batch-size", "0"), ("--seq-length", "x"), ("--steps", "-1"), ("--lr", "nan"),
                          ("--max-grad-norm", "-2"), ("--threads", "0")]:  # fmt: skip
        with pytest.raises(SystemExit):
            train(option, value)
        assert f"argument {option}: must be a " in capsys.readouterr().err


def test_batches_depend_on_step_and_seed_alone():
    data = Data(torch.arange(40), seq_length=4, batch_size=3, seed=7)
    seen = torch.cat([data.at(step) for step in range(10)])
    assert torch.equal(data.at(7), Data(torch.arange(40), 4, 3, 7).at(7))
    for turn in range(3):  # each window once a turn
        assert sorted(seen[10 * turn : 10 * turn + 10, 0].tolist()) == list(range(0, 40, 4))
    assert not torch.equal(seen[:10], seen[10:20])


def test_short_or_foreign_tokens(tmp_path):
    with pytest.raises(CommandError, match="at least 50 tokens"):
        Data(torch.arange(40), seq_length=50, batch_size=1, seed=0)
    for array in (np.array([5, 97]), np.array([-1])):
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(
            CommandError, match=f"data must be token ids below 97, .* are {array.min()} to {array.max()}"
        ):
            load_tokens(tmp_path / "x.npy", None, 97)


@pytest.mark.parametrize("array", [np.array([0.5]), np.array(3), np.array([True]), np.ones((2, 3), int)])
def test_tokens_are_one_row_of_integers(tmp_path, array):
    """Several rows were joined in silence, across the ends of their texts."""
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(CommandError, match=r"one row of integers.* of shape"):
        load_tokens(tmp_path / "x.npy", None, 97)


def test_data_without_tokens_are_named(tmp_path):
    (tmp_path / "text").write_text("")
    with pytest.raises(CommandError, match=r"data must have tokens, but .* has none"):
        load_tokens(tmp_path / "text", lambda text, verbose: {"input_ids": []}, 10)


def test_text_through_a_tokenizer(tmp_path):
    (tmp_path / "text").write_text("abc")
    tokens = load_tokens(tmp_path / "text", lambda text, verbose: {"input_ids": [ord(c) - 97 for c in text]}, 10)
    assert tokens.tolist() == [0, 1, 2]
