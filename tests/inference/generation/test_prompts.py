"""From prompts to tokens: whatever is given, each text is continued as it would be alone, or rejected by name."""

import io
import os
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BloomConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nearflash.abi.errors import CommandError
from nearflash.cli import main as cli
from nearflash.inference import AttentionPolicy, open_engine
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.commands.console import read_prompts
from nearflash.inference.generate import generate
from nearflash.inference.prompts import encode_text, pad_left, position_limit, prompt_rows
from nearflash.inference.session import Session
from nearflash.offload import generate as offloaded
from nearflash.offload.commands.generate import token_rows
from nearflash.planning.policy import OffloadPolicy, Shares

IDS = [[5, 6, 7], [8, 9]]
TEMPLATE = "<b>{% for m in messages %}{{ m['content'] }}!{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    """One token a letter, each text with a first one, `<b>`, and padded on the right, as AutoTokenizer has it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({"<e>": 0} | {letter: n + 1 for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.add_special_tokens(["<b>"])
    own.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 257)])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<e>", pad_token="<e>", bos_token="<b>", padding_side="right",
        chat_template=TEMPLATE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, eos_token_id=None,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         bos_token_id=257, initializer_range=0.2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


def texts(model, tokenizer, prompts, **options):
    with open_engine(kv_shape_of(model.config), AttentionPolicy("dense"), tokens=64, sequences=4) as engine:
        return generate(model, tokenizer, prompts, engine, **({"max_new_tokens": 6} | options)).tokens


def test_each_text_of_a_batch_is_that_of_its_prompt_alone(model, tokenizer):
    prompts = ["The quick brown fox", "Once", "a"]
    alone = [texts(model, tokenizer, [prompt])[0] for prompt in prompts]
    assert texts(model, tokenizer, prompts) == alone == texts(model, tokenizer, prompts, mini_batches=3)
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for same in (rows, tuple(rows), [torch.tensor(rows[0]), np.array(rows[1]), prompts[2]]):
        assert texts(model, tokenizer, same) == alone
    for one in ("Once", rows[1], torch.tensor(rows[1]), torch.tensor(rows[1:2])):
        assert texts(model, tokenizer, one) == alone[1:2]


def test_offloading_and_sessions_take_the_same_prompts(model, tokenizer, folder):
    policy = OffloadPolicy(2, 1, weights=Shares(gpu=1), cache=Shares(gpu=1), activations=Shares(gpu=1))
    wanted = texts(model, tokenizer, ["Once"])
    assert offloaded(folder, "Once", policy, max_new_tokens=6).tokens == wanted
    assert offloaded(folder, np.array([tokenizer("Once")["input_ids"]]), policy, max_new_tokens=6).tokens == wanted
    with open_engine(kv_shape_of(model.config), AttentionPolicy("dense"), tokens=64, sequences=1) as engine:
        with Session(model, tokenizer, engine) as session:
            assert session.generate(tokenizer("Once")["input_ids"], max_new_tokens=6).tokens == wanted
            with pytest.raises(CommandError, match="prompt must be one, not 2"):
                session.generate(["a", "b"])


@pytest.mark.parametrize(("prompts", "message"), [
    ([], "prompts must be at least one"), ((), "prompts must be at least one"),
    ({"input_ids": [[1]]}, "prompts must be texts, or lists of token ids, not dict"),
    (b"Once", "prompts must be texts"), (None, "prompts must be texts"), (7, "prompts must be texts"),
    (["Once", None], "prompt 1 must be a text, or a list of token ids, not NoneType None"),
    (["Once", 7], "prompt 1 must be a text"), ([[1.0, 2.0]], "prompt 0 must be a text"),
    ([[True, False]], "prompt 0 must be a text"), ([torch.tensor([0.5])], "prompt 0 must be a text"),
    (torch.zeros(1, 2, 3), "prompts must be texts"), ([[[1]]], "prompt 0 must be a text"),
    ([[1], []], "prompts must have a token at least, but number 1 is empty"),
    ([[1, -1]], "tokens of prompt 0 must be 0 to 257, as the model's embeddings are, not -1"),
    ([[258]], "tokens of prompt 0 must be 0 to 257"), (["a\ud800"], "prompt must be a text that UTF-8 has"),
])  # fmt: skip
def test_what_is_no_prompt_is_rejected(tokenizer, prompts, message):
    with pytest.raises(CommandError, match=message):
        prompt_rows(prompts, partial(encode_text, tokenizer), 258)


def test_padding_is_on_the_left():
    batch = pad_left(IDS, 3, "cpu")
    assert batch["input_ids"].tolist() == [[5, 6, 7], [3, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]


def test_positions_that_a_model_has():
    assert position_limit(LlamaConfig(max_position_embeddings=77)) == 77
    assert position_limit(BloomConfig()) is None
    grows = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert position_limit(LlamaConfig(max_position_embeddings=77, rope_parameters=grows)) is None


def command(capsys, *argv):
    code = cli.main([*map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_chat_begins_once_in_memory_and_by_a_plan(capsys, tmp_path, folder, model, tokenizer):
    """The template has the first token: the tokenizer must not add another."""
    own = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_tensors="pt", return_dict=True)
    assert own["input_ids"].tolist() == [[257, *tokenizer("Hi!", add_special_tokens=False)["input_ids"]]]
    right = tokenizer.decode(model.generate(**own, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 4:])
    plan = tmp_path / "plan.json"
    assert (
        cli.main(["plan", str(folder), "--hardware", "t4", "--prompt-len", "9", "--gen-len", "5", "-o", str(plan)]) == 0
    )
    for how in ((), ("--plan", plan), ("--session", tmp_path / "kv")):
        capsys.readouterr()
        code, out, err = command(capsys, "generate", "--model", folder, "--chat", "Hi", "--max-new-tokens", 5, *how)
        assert code == 0, err
        assert out == f"Hi => {right}\n\n"


def test_only_newlines_end_a_prompt_of_a_file(tmp_path):
    file = tmp_path / "prompts"
    odd = "one\u2028two\x0bthree\x0cfour\x85five\rsix\x1cseven\u2029eight"
    file.write_bytes(f"{odd}\n\n  \nnext\r\nlast".encode())
    assert read_prompts(None, file, io.StringIO()) == [odd, "next", "last"]
    assert token_rows(["[5, 6]", "[7]"]) == [[5, 6], [7]]
    assert token_rows(["[5, 6]", "next"]) is None and token_rows(["5"]) is None


def test_prompts_of_no_regular_file_are_rejected_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("nearflash.support.files.MAX_TEXT_BYTES", 4)
    monkeypatch.setattr("nearflash.support.files.read_text.__defaults__", (4,))
    (tmp_path / "large").write_text("12345")
    for name, why in (("pipe", "it is no regular file"), ("large", "it has more than 4 bytes"), ("", "")):
        with pytest.raises(CommandError, match=rf"prompts must be in a readable file, not .*{why}"):
            read_prompts(None, tmp_path / name, io.StringIO())


def test_a_device_that_is_none_is_rejected_before_the_model_is_loaded(capsys, folder, monkeypatch):
    monkeypatch.setattr("nearflash.offload.commands.runtime.load_model", lambda *_, **__: pytest.fail("loaded"))
    code, _, err = command(capsys, "generate", "--model", "/nowhere", "Hi", "--device", "gpu")
    assert code == 2 and err.startswith("nearflash: device must be cpu, cuda, cuda:N, or one of ")
    assert "model" in err and "verilator" in err and len(err) < 250
    code, _, err = command(capsys, "generate", "--model", folder, "Hi", "--device", "cuda:99")
    assert code == 2 and "device 'cuda:99' must be a GPU that torch can use" in err


def test_positions_are_checked_before_anything_is_computed(capsys, folder, tmp_path):
    for how in ((), ("--session", tmp_path / "kv"), ("--plan", "auto")):
        code, _, err = command(capsys, "generate", "--model", folder, "Hi" * 20, "--max-new-tokens", 30, *how)
        assert code == 2 and "max_new_tokens must be 23 or less after 41 tokens, not 30: the model has 64" in err
        code, _, err = command(capsys, "generate", "--model", folder, "Hi" * 40, *how)
        assert code == 2 and "prompts must have fewer tokens than the model has positions, 64, not 81" in err
    assert not (tmp_path / "kv").exists()
