import json
import math
import signal
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
import transformers

from nearflash.abi.errors import WeightsError
from nearflash.cli import compress
from nearflash.cli.main import main
from nearflash.weights import expand, open_checkpoint
from nearflash.weights.convert import layer_weights
from nearflash.weights.pretrained import load_pretrained, own_dtype

MODEL = Path(__file__).parents[1] / "data/doclm-7m"
WINDOWS = ("--tokens", "64", "--windows", "4")


@pytest.fixture
def texts(tmp_path):
    from pydoc_data.topics import topics

    path = tmp_path / "manual.txt"
    path.write_text("\n\n".join(topics[name] for name in ("assignment", "lambda", "numbers", "try")))
    return str(path)


def run(output, *options):
    return main(["compress", str(MODEL), "-o", str(output), *options])


def densities(folder):
    model, _ = load_pretrained(folder)
    return {name: float((model.get_parameter(name) != 0).float().mean()) for name in layer_weights(model)}


def test_a_model_that_is_not_pruned_keeps_every_bit(tmp_path, capsys):
    assert run(tmp_path / "small", "--method", "none") == 0
    assert "1.000 of the model as asked for: " in capsys.readouterr().out
    model, _ = load_pretrained(MODEL, own_dtype(MODEL))
    small, tokenizer = load_pretrained(tmp_path / "small", own_dtype(MODEL))
    expected, found = model.state_dict(), small.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert tokenizer("x = 1")["input_ids"]


@pytest.mark.parametrize(
    "method", ["wanda", *(pytest.param(method, marks=pytest.mark.full) for method in ("sparsegpt", "magnitude"))]
)
def test_half_of_the_weights_pruned(tmp_path, capsys, texts, method):
    assert run(tmp_path / "small", "--method", method, "--texts", texts, *WINDOWS) == 0
    shares = densities(tmp_path / "small")
    assert shares.values() and all(share == pytest.approx(0.5, abs=0.01) for share in shares.values())
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "small/compression.json").read_text())
    before, after = report["perplexity"]["before"], report["perplexity"]["after"]
    assert 1 < before < after < 100 * before
    assert f"{before:.3f} before, {after:.3f} after ({math.log(after / before):+.4f} nats a token)" in out
    assert f"pruned {len(shares)}/{len(shares)}, " in err and " windows of 64 tokens" in err
    compressed = report["compressed"]
    assert 0.4 < compressed["bytes_fraction_of_dense"] < 0.53 and compressed["density"] == pytest.approx(0.5, abs=0.01)
    assert {tensor["name"] for tensor in report["tensors"]} > shares.keys()
    checkpoint = open_checkpoint(tmp_path / "small")
    stored = sum(checkpoint[name].stored_bytes for name in shares)
    assert stored == compressed["bytes"] and report["bytes"] == (tmp_path / "small/model.safetensors").stat().st_size


def test_a_folder_without_a_tokenizer_is_pruned_without_texts(tmp_path, capsys):
    """Regression: what save_pretrained writes of a model alone was rejected for the tokenizer that nothing needs."""
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                                      num_attention_heads=2, dtype="float16")  # fmt: skip
    transformers.LlamaForCausalLM(config).half().save_pretrained(tmp_path / "big")
    assert main(["compress", str(tmp_path / "big"), "--method", "magnitude", "-o", str(tmp_path / "small")]) == 0
    assert open_checkpoint(tmp_path / "small")["model.layers.0.mlp.up_proj.weight"].form == "bitmap"
    (tmp_path / "text.txt").write_text("a b c")
    options = ("--texts", str(tmp_path / "text.txt"), "-o", str(tmp_path / "other"))
    assert main(["compress", str(tmp_path / "big"), *options]) == 2
    assert "has no tokenizer" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_a_pattern_quantised(tmp_path, texts):
    options = ("--method", "magnitude", "--pattern", "2:4", "--bits", "8", "--dtype", "bf16")
    assert run(tmp_path / "small", *options) == 0
    report = json.loads((tmp_path / "small/compression.json").read_text())
    assert (report["pattern"], report["sparsity"], report["perplexity"]) == ("2:4", None, None)
    assert report["compressed"]["bytes_fraction_of_dense"] < 0.42 and report["dtype"] == "bf16"
    model, _ = load_pretrained(tmp_path / "small")
    for name in layer_weights(model):
        assert ((model.get_parameter(name).reshape(-1, 4) != 0).sum(1) <= 2).all()


def test_codes_of_four_bits_of_all_weights(tmp_path):
    assert run(tmp_path / "small", "--method", "none", "--format", "groups", "--bits", "4") == 0
    report = json.loads((tmp_path / "small/compression.json").read_text())
    assert report["compressed"]["forms"].keys() == {"int4"} and report["others"]["forms"].keys() == {"coded", "dense"}
    assert report["compressed"]["bytes_fraction_of_dense"] < 0.3 and report["method"] == "none"


def test_a_compressed_model_can_be_compressed_again(tmp_path):
    assert run(tmp_path / "once", "--method", "magnitude") == 0
    assert (
        main(
            [
                "compress",
                str(tmp_path / "once"),
                "-o",
                str(tmp_path / "twice"),
                "--method",
                "none",
                "--format",
                "coded-bitmap",
            ]
        )
        == 0
    )
    first, second = (open_checkpoint(tmp_path / name) for name in ("once", "twice"))
    assert all(first[name].read().tobytes() == second[name].read().tobytes() for name in first)


def test_a_model_generates_from_compressed_weights(tmp_path, capsys):
    run(tmp_path / "small", "--method", "magnitude")
    model, tokenizer = load_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    capsys.readouterr()
    texts = []
    for folder in (tmp_path / "dense", tmp_path / "small"):
        options = ["--max-new-tokens", "4", "--path", str(tmp_path / "kv")]
        assert main(["generate", "--model", str(folder), *options, "The list"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()


def test_damaged_weights_are_no_model(tmp_path):
    run(tmp_path / "small", "--method", "magnitude")
    path = tmp_path / "small/model.safetensors"
    content = bytearray(path.read_bytes())
    tensor = open_checkpoint(path)["model.layers.1.mlp.up_proj.weight"]
    content[tensor.offset + 100] ^= 4
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.1.mlp.up_proj.weight', at byte \d+"):
        load_pretrained(tmp_path / "small")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "texts must be given for the method wanda: --texts FILE …"),
        (("--lossless", "--method", "wanda"), "method must be left out with --lossless"),
        (("--lossless", "--bits", "8", "--dtype", "bf16"), "bits and dtype must be left out with --lossless"),
        (("--method", "none", "--format", "groups"), "bits must be 8 or 4 with the format groups: --bits 8"),
        (("--method", "magnitude", "--sparsity", "1.5"), "sparsity must be above 0 and below 1, not 1.5"),
        (("--method", "none", "--sparsity", "0.3"), "sparsity must be left out with the method none"),
        (("--lossless", "--sparsity", "0.5"), "sparsity must be left out with --lossless"),
        (("--method", "magnitude", "--sparsity", "0.3", "--pattern", "2:4"), "sparsity must be left out with pattern"),
        (("--method", "magnitude", "--pattern", "2:5"), "pattern 2 of 5 must divide the "),
        (("--texts", "nowhere.txt"), "texts must be readable UTF-8 files, not 'nowhere.txt'"),
    ],
)
def test_bad_options_are_named_and_write_nothing(tmp_path, capsys, options, message):
    assert run(tmp_path / "small", *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "small").exists()


def test_what_is_not_stored_in_16_bits_is_not_taken_for_it(tmp_path, capsys):
    """fp32 weights became fp16 where every bit was to be kept."""
    model, tokenizer = load_pretrained(MODEL)
    model.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    for name in (str(tmp_path / "wide"), "smollm2"):
        assert main(["compress", name, "--lossless", "-o", str(tmp_path / "small")]) == 2
        assert "model must be a folder of safetensors in 16 bits or fp8, without an adapter" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_every_weight_as_it_is_stored(tmp_path):
    assert run(tmp_path / "small", "--lossless") == 0
    first, second = (open_checkpoint(each) for each in (MODEL, tmp_path / "small"))
    assert first.keys() == second.keys() and {tensor.form for tensor in second.values()} == {"coded", "dense"}
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype and expand(second[name]).tobytes() == tensor.read().tobytes()


@pytest.mark.parametrize("pattern", ["2", "4:2", "0:4", "2:4:8", "a:b"])
def test_a_pattern_that_is_none(tmp_path, capsys, pattern):
    with pytest.raises(SystemExit):
        run(tmp_path / "small", "--pattern", pattern)
    assert "must be N:M with 0 < N < M, like 2:4" in capsys.readouterr().err


def test_a_folder_with_files_is_refused_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file"):
        assert main(["compress", "nowhere", "-o", str(place), "--method", "none"]) == 2
        assert "output must be a new or an empty folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_weights_that_gain_nothing_stay_dense(tmp_path, capsys):
    assert run(tmp_path / "small", "--method", "none", "--format", "bitmap") == 0
    report = json.loads((tmp_path / "small/compression.json").read_text())
    assert report["compressed"]["forms"].keys() == {"dense"}
    assert report["compressed"]["bytes_fraction_of_dense"] == 1 and report["bytes_fraction_of_dense"] < 1.01
    assert "forms dense (" in capsys.readouterr().out


def test_a_configuration_states_the_dtype(tmp_path):
    assert own_dtype(MODEL) == "fp16"
    config = json.loads((MODEL / "config.json").read_text())
    for stated, expected in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp16"), (None, "fp16")):
        config["torch_dtype"] = stated
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert own_dtype(tmp_path) == expected


def test_an_interrupt_ends_with_a_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compress._Report, "add", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run(tmp_path / "small", "--lossless") == 130
    assert capsys.readouterr().err == "nearflash: interrupted\n" and not (tmp_path / "small").exists()
