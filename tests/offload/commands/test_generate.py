"""`nearflash generate --plan`: what it refuses, what it prints, the tokens of the command without a plan."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("scipy")
pytest.importorskip("accelerate")

from nearflash.abi.errors import CommandError, PlanError, UnsupportedError
from nearflash.cli.plan import tune
from nearflash.identity import weights_digests
from nearflash.inference.calibration.choose import UNIFORM, model_digest
from nearflash.inference.policy.files import PolicyFile, own_folder
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import default_layout
from nearflash.offload import OffloadedModel
from nearflash.offload.commands import generate as command
from nearflash.planning import plan_file
from nearflash.planning.plan_file import PLAN_NAME
from nearflash.planning.profile import load_machine
from nearflash.storage.kv import KvShape
from nearflash.support.tables import read_json
from nearflash.weights.pretrained import load_model

MODEL = Path(__file__).parents[2] / "data/doclm-7m"
LINES = ("The kernel reads", "A drive that", "In this chapter we describe how to")


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """No test measures the machine."""
    from nearflash.offload.machine import plan as machine_plan

    machine = load_machine("gpu24").with_memory(gpu_bytes=2e9, host_bytes=2e9, disk_bytes=1e9)
    monkeypatch.setattr(machine_plan, "load_kept_machine", lambda folder, dtype: machine)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(LINES) + "\n")
    return str(file)


def run(*options, model=MODEL):
    return called(command.generate, "generate", "--model", model, "--max-new-tokens", 6, *options)


def called(add, *argv):
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    parser.set_defaults(verbose=False)
    arguments = parser.parse_args([str(each) for each in argv])
    return arguments.run(arguments)


def texts_of(capsys):
    return [text for text in capsys.readouterr().out.split("\n\n") if text.strip()]


def test_a_mode_that_there_is_not_is_refused_in_the_words_of_the_command_line(capsys):
    """Before: the choices were shown as Python shows an enumeration's members."""
    with pytest.raises(SystemExit):
        run("--attention", "sparf-pages", "x")
    assert "choose from 'dense', 'sparq', 'sparf', 'sparf-page', 'kvswap')" in capsys.readouterr().err


def test_a_plan_gives_the_texts_of_the_command_without_one(prompts, capsys):
    run("--prompts", prompts, "--attention", "dense")
    expected = texts_of(capsys)
    assert run("--prompts", prompts, "--plan", "auto") == 0
    out, err = capsys.readouterr()
    assert [text for text in out.split("\n\n") if text.strip()] == expected and len(expected) >= len(LINES)
    assert err.startswith("It fits a workstation") or "It fits " in err
    assert re.search(r"18 tokens in .* token/s, .* predicted", err)


def test_budgets_force_other_tiers(prompts, capsys):
    assert run("--prompts", prompts, "--plan", "auto", "--gpu-memory", "0.008", "--host-memory", "0.02") == 0
    err = capsys.readouterr().err
    assert float(re.search(r"at most in use: .*host ([\d.]+) MB", err)[1]) > 1


def test_a_budget_that_is_too_small_is_refused_before_anything_is_loaded(prompts):
    with pytest.raises(PlanError, match="must fit"):
        run(
            "--prompts",
            prompts,
            "--plan",
            "auto",
            "--gpu-memory",
            "0.0001",
            "--host-memory",
            "0.0001",
            "--disk",
            "1e-6",
        )


def test_the_plan_beside_the_model_is_taken(tmp_path, prompts, capsys, monkeypatch):
    folder = linked(tmp_path)
    assert (
        called(tune, "tune", folder, "--hardware", "gpu24", "--prompt-len", 16, "--gen-len", 6) == 0
        and (folder / PLAN_NAME).is_file()
    )
    trace, reads = tmp_path / "trace.json", []
    monkeypatch.setattr(plan_file, "read_json", lambda *options: reads.append(options) or read_json(*options))
    assert run("--prompts", prompts, "--plan", "auto", "--trace", trace, "--max-new-tokens", 3, model=folder) == 0
    assert len(reads) == 1  # regression: bits of the cache were of another reading than all else
    assert f"plan: {folder / PLAN_NAME}, " in capsys.readouterr().err
    body = json.loads((folder / PLAN_NAME).read_text())
    # Steps are those of the plan, whatever the run's: their seconds were divided by the run's.
    events = json.loads(trace.read_text())["traceEvents"]
    row = next(each["tid"] for each in events if each["ph"] == "M" and each["args"]["name"] == "phases")
    steps = [each["dur"] / 1e6 for each in events if each["tid"] == row and each["name"].startswith("step")]
    assert steps == pytest.approx([body["prediction"]["decode_seconds"] / 5] * 5)
    (folder / PLAN_NAME).write_text(json.dumps(body | {"shape_digest": "0" * 64}))
    with pytest.raises(PlanError, match="must be for the model that runs it"):
        run("--prompts", prompts, "--plan", folder / PLAN_NAME, model=folder)


def test_finished_texts_are_kept_and_traced(tmp_path, prompts, capsys):
    results, trace = tmp_path / "results.jsonl", tmp_path / "trace.json"
    run("--prompts", prompts, "--plan", "auto", "--results", results, "--trace", trace)
    first = texts_of(capsys)
    assert results.stat().st_mode & 0o777 == 0o600
    events = json.loads(trace.read_text())["traceEvents"]
    assert {each["name"] for each in events if each["pid"] == 1} >= {"compute"}
    assert {each["name"] for each in events if each["pid"] == 2 and each["ph"] == "X"} >= {"prefill", "step 1"}
    assert [each["args"]["name"] for each in events if each["name"] == "process_name"] == ["measured", "predicted"]
    run("--prompts", prompts, "--plan", "auto", "--results", results)
    out, err = capsys.readouterr()
    assert [text for text in out.split("\n\n") if text.strip()] == first
    assert "all 3 texts were in the results already" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu-memory", "1"), "gpu_memory must be given with --plan FILE, or --plan auto"),
        (("--plan", "auto", "--weights", "disk=1"), "weights must be left out with --plan, which says where"),
        (("--batch-size", "3"), "batch_size must be given with --plan FILE, or --plan auto"),
        (("--weights", "disk=1", "--disk", "1"), "disk must be given with --plan auto, which fills so much"),
        (("--plan", "auto", "--dtype", "fp16"), "dtype must be left out with a plan"),
        (("--plan", "auto", "--mini-batches", "2"), "mini_batches must be 1 with a plan"),
        (("--plan", "auto", "--stream", "--json"), "stream must be given without results and json"),
        (("--plan", "auto", "--device", "cpu", "--kv-device", "model"), "device must be left out with kv_device"),
        (("--nand-block-pages", "64"), "nand_block_pages must be 0 with device cpu, which has no NAND, not 64"),
        (("--model-device", "model"), "model_device must be cpu, cuda or cuda:N, not 'model'"),
        (("--kv-device", "cuda"), "model_device must be cuda where K and V are there, not cpu"),
        (
            ("--kv-device", "model:attend-tiny", "--path", "kv", "--nand-block-pages", "64"),
            "path must be left out with nand_block_pages",
        ),
        (("--weights-path", "a"), "weights_path must be given with --plan FILE, or --plan auto"),
        (
            ("--weights", "disk=1", "--weights-path", "a", "--weights-ratio", "2,1"),
            "weights_ratio must have a number for each weights_path",
        ),
        (
            ("--weights", "disk=1", "--weights-path", "a", "--expand-device", "model"),
            "weights_path must be left out with expand_device",
        ),
        (("--path", "a", "--path", "./a"), "path must name each file once"),
        (("--attention", "dense", "--top-k", "4"), "top_k must be left out with attention dense, which reads all"),
        (("--expand-device", "model"), "expand_device must be given with --plan FILE, or --plan auto"),
        (
            ("--weights", "disk=1", "--expand-device", "model", "--expert-memory", "1"),
            "expert_memory must be left out with expand_device",
        ),
        (("--cache", "device=1"), "kv_device must be given: the plan places 100% of the KV cache on near-storage"),
        (
            ("--cache-bits", "4", "--cache", "host=1", "--attention", "sparf"),
            "cache_bits must be 16 where an attention",
        ),
        (("--cache-bits", "4", "--cache", "host=1", "--stream"), "cache_bits must be 16 where an attention"),
        (("--cache-bits", "4", "--cache", "host=1", "--session", "kv"), "cache_bits must be 16 with session"),
        (
            ("--cache", "host=1", "--cache-size", "2G"),
            "--cache-size must be left out where the plan's tiers hold K and V",
        ),
        (("--cache", "host=1", "--stripe-ratio", "1"), "--stripe-ratio must be left out where the plan's tiers hold"),
        (("--cache", "host=1", "--read-ahead"), "--read-ahead must be left out where the plan's tiers hold K and V"),
        (("--cache", "host=1", "--path", "a", "--path", "b", "--stripe-ratio", "1"), "stripe_ratio must have a number"),
    ],
)
def test_options_that_do_not_go_together(options, message, monkeypatch):
    monkeypatch.setattr(OffloadedModel, "__init__", None)  # nothing is loaded before
    with pytest.raises(CommandError, match=re.escape(message)):
        run("a prompt", *options)


@pytest.mark.parametrize("options", [(), ("--no-overlap",)])
def test_a_plan_that_is_found_overlaps_unless_told_otherwise(options, monkeypatch):
    class Opened(Exception):
        """Holds the policy."""

    def open_model(self, model, policy, **_):
        raise Opened(policy)

    monkeypatch.setattr(OffloadedModel, "__init__", open_model)
    with pytest.raises(Opened) as opened:
        run("a prompt", "--plan", "auto", *options)
    assert opened.value.args[0].overlap is not bool(options)


def test_a_template_wraps_no_tokens():
    with pytest.raises(CommandError, match="chat must be left out where prompts are tokens"):
        run("[1, 2]", "--json", "--chat")


def test_pages_come_from_the_drive_beside_a_device(tmp_path, capsys):
    text = " ".join(f"In chapter {number} we count." for number in range(60))  # some index blocks of 256 tokens
    policy = ("--attention", "sparf-page", "--top-k", "4", "--min-tokens", "16", "--local-window", "8")
    options = (text, "--weights", "gpu=1", "--kv-device", "model:attend-smartssd-tiny", *policy)
    run(*options, "--max-new-tokens", 2)
    expected = texts_of(capsys)
    path = tmp_path / "drive"
    run(*options, "--max-new-tokens", 2, "--path", path, "--cache-size", "1M")
    out, err = capsys.readouterr()
    assert [text for text in out.split("\n\n") if text.strip()] == expected and not path.exists()
    moved = {link: float(size) for link, size in re.findall(r"cache (\w+ to \w+) ([\d.]+) MB", err)}
    assert moved["disk to device"] > moved["host to device"] > moved["device to host"] == 0.0
    with pytest.raises(UnsupportedError, match=r"head 0 on model:attend-smartssd-tiny must take at most \d+ pages"):
        run(*options[:-8], "--attention", "dense", "--path", path, "--cache-size", "64K")


def test_layers_on_disk_come_from_several_drives(prompts, tmp_path, capsys):
    run("--prompts", prompts, "--weights", "disk=1", "--attention", "dense")
    expected = texts_of(capsys)
    paths = [tmp_path / "a", tmp_path / "b"]
    options = [word for path in paths for word in ("--weights-path", path)]
    run("--prompts", prompts, "--weights", "disk=1", "--attention", "dense", "--weights-ratio", "2,1", *options)
    out, err = capsys.readouterr()
    assert [text for text in out.split("\n\n") if text.strip()] == expected
    assert re.search(r"weights: .* GB are copied once to .*a, .*b", err)
    assert re.search(r"weights from .*a [\d.]+ MB, .*b [\d.]+ MB", err)


def test_a_plan_that_is_searched_knows_what_a_policy_reads(prompts, capsys):
    """Its bytes are those of the share that is read at most, index included."""
    from nearflash.offload.cache.engines import engine_read_fraction

    sparse = AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.125, local_window=1, min_tokens=0)
    shape = KvShape(6, 2, 128)
    assert engine_read_fraction(AttentionPolicy(), shape, 4096) == 1
    assert 0.125 < engine_read_fraction(sparse, shape, 4096) < 0.3
    options = ("--attention", "sparf-page", "--min-tokens", "0", "--top-k", "0.125", "--gpu-memory", "0.05")
    assert run("--prompts", prompts, "--plan", "auto", *options) == 0
    assert "policy: sparf-page, as the options say" in capsys.readouterr().err


DISK = ("--weights", "disk=1", "--batch-size", "2", "--num-batches", "2")
"""A plan by hand, whose weights are read at each visit."""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("--cache", "disk=1"), "cache host to disk"),
        (("--attention", "sparf-page", "--cache", "gpu=1"), "weights disk to host"),
        (("--attention", "sparq", "--cache", "disk=1"), ", disk "),
        (("--path", "FILE.a", "--path", "FILE.b", "--stripe-ratio", "2,1"), "cache host to disk"),
        (("--kv-device", "model:attend-tiny"), "cache host to device"),
        (("--kv-device", "model:attend-tiny,model:attend-tiny", "--cache", "device=0.5,host=0.5"), "host to device"),
    ],
    ids=["disk", "sparse memory", "sparse disk", "files", "device", "devices"],
)
def test_a_plan_by_hand_gives_the_texts_of_memory(prompts, tmp_path, capsys, given, shown):
    """Contexts so short are read in full by every policy (--min-tokens)."""
    run("--prompts", prompts, "--attention", "dense")
    expected = texts_of(capsys)
    options = [option.replace("FILE", str(tmp_path / "kv")) for option in given]
    assert run("--prompts", prompts, *DISK, *options) == 0
    out, err = capsys.readouterr()
    assert [text for text in out.split("\n\n") if text.strip()] == expected
    assert shown in err and "weights disk to host" in err
    assert "--path" not in given or {file.name for file in tmp_path.iterdir()} >= {"kv.a", "kv.b"}


def test_a_stream_by_a_plan_is_the_text(capsys):
    run(LINES[0], "--attention", "dense")
    expected = capsys.readouterr().out
    assert run(LINES[0], *DISK, "--stream") == 0
    out, err = capsys.readouterr()
    assert out.strip() == expected.strip() and "moved: weights disk to host" in err


def test_a_session_by_a_plan_goes_on_in_memory_and_back(tmp_path, capsys):
    """Kept K and V are the model's, wherever its weights lie: what was computed is not computed again."""
    run(f"{LINES[0]} of a", "--attention", "dense", "--dtype", "fp16")
    expected, file = capsys.readouterr().out, ("--session", tmp_path / "kv")
    run(LINES[0], *DISK, *file)
    for how in (("--dtype", "fp16"), DISK):
        capsys.readouterr()
        assert run(f"{LINES[0]} of a", *how, *file) == 0
        out, err = capsys.readouterr()
        assert out == expected
        assert int(re.search(r"K and V of (\d+) of them are used again", err)[1]) > 0
    with pytest.raises(OSError, match="its weights are another one's"):
        run(LINES[0], "--weights", "host=1", "--weight-bits", "4", *file)


@pytest.mark.parametrize("setting", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=["beams", "drafts"])
def test_settings_of_one_call_are_followed_by_a_plan(tmp_path, prompts, capsys, setting):
    """Beams need a cache that forks: those of a block are one call."""
    folder = linked(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(setting))
    one = ["--prompts", prompts] if "num_beams" in setting else [LINES[0]]
    run(*one, "--attention", "dense", model=folder)
    expected = texts_of(capsys)
    assert run(*one, *DISK, model=folder) == 0
    assert texts_of(capsys) == expected
    with pytest.raises(CommandError, match="results must be left out"):
        run(*one, *DISK, "--results", tmp_path / "results", model=folder)


@pytest.mark.parametrize("what", ["4 bits", "alibi"])
def test_a_long_context_that_engines_do_not_serve_stays_on_tiers(saved, tmp_path, capsys, what):
    """The default policy would choose what is read of it; nobody asked for that."""
    folder, prompts = tmp_path / "model", tmp_path / "prompts"
    prompts.write_text(json.dumps([5 + number % 90 for number in range(1030)]))
    if what == "alibi":
        import transformers

        sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.FalconConfig(**sizes, initializer_range=0.2, alibi=True, multi_query=False)
        transformers.FalconForCausalLM(config).save_pretrained(folder)
        options, line = (), "policy: dense, K and V on the plan's tiers, as model must be a decoder with plain softmax"
    else:
        folder, _ = saved("llama", max_position_embeddings=2048, num_hidden_layers=2)
        options, line = ("--cache-bits", "4"), "plan: as the options say"
    assert run("--json", "--prompts", prompts, "--cache", "host=1", *options, model=folder) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["tokens"]) == 6 and line in err


def test_a_calibration_of_the_weights_is_found_by_a_plan(tmp_path, capsys, monkeypatch):
    """Its digest is that of the weights as the plan computes with them, which are read for it one by one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config, prompts = json.loads((MODEL / "config.json").read_text()), tmp_path / "prompts"
    prompts.write_text(json.dumps(list(range(3, 1030))))
    base = AttentionPolicy("sparf-page", score_dims=8, top_p=0.5)
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    table = replace(base, overrides={(layer, head): base for layer in range(layers) for head in range(heads)})
    model = load_model(MODEL, "fp16")
    layout = default_layout(config["hidden_size"] // config["num_attention_heads"], UNIFORM, 1 << 20)
    for weights, line in (
        (weights_digests(model, (model.dtype,)), r"policy: \S+own.json, calibrated for doclm"),
        ({"float16": "tuned"}, r"uniform sparf-page, as \S+own.json was calibrated for other weights"),
    ):
        file = PolicyFile("doclm", model_digest(model.config), table, layout, 0.1, 0.1, "a test", weights)
        file.write(own_folder() / "own.json")
        assert run("--json", "--prompts", prompts, *DISK, "--max-new-tokens", 2) == 0
        out, err = capsys.readouterr()
        assert re.search(line, err) and len(json.loads(out)["tokens"]) == 2, err


def linked(tmp_path):
    """A folder whose files are links to the model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_a_plans_file_has_its_own_memory(tmp_path, prompts):
    with pytest.raises(CommandError, match="gpu must be given with --plan auto: the plan in "):
        run("--prompts", prompts, "--plan", tmp_path / "plan.json", "--gpu-memory", "1")
    with pytest.raises(PlanError, match="must be a readable JSON file"):
        run("--prompts", prompts, "--plan", tmp_path / "plan.json")


def test_no_model_of_a_package(prompts):
    with pytest.raises(CommandError, match="model must be a folder of safetensors here, not smollm2"):
        run("--prompts", prompts, "--plan", "auto", model="smollm2")


@pytest.mark.parametrize("text", ["0", "-1", "some", "nan"])
def test_memory_is_a_number_above_zero(text, capsys):
    with pytest.raises(SystemExit):
        run("a", "--plan", "auto", "--gpu-memory", text)
    assert "must be a number of gigabytes above 0" in capsys.readouterr().err
