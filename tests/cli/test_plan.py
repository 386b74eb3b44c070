import argparse
import itertools
import json
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from nearflash.abi.errors import CommandError, PlanError, WeightsError
from nearflash.cli import plan as command
from nearflash.offload.machine import plan as machine_plan
from nearflash.offload.machine.plan import model_shape
from nearflash.planning.plan_file import PLAN_NAME, read_plan
from nearflash.planning.profile import load_machine, machine_toml

MODEL = Path(__file__).resolve().parents[1] / "data" / "doclm-7m"


def run(*argv):
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    command.plan(subparsers)
    command.tune(subparsers)
    arguments = parser.parse_args([str(each) for each in argv])
    return arguments.run(arguments)


def test_a_curve_has_a_plan_for_one_prompt_and_for_many(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "curve.png"
    options = ("--hardware", "t4", "--prompt-len", 64, "--gen-len", 8, "--prompts", 8, "--curve", file)
    run("plan", MODEL, *options, "--json")
    found = json.loads(capsys.readouterr().out)
    points = found["curve"]
    assert file.read_bytes().startswith(b"\x89PNG")
    assert points[0]["sequences"] == 1 and points[-1]["sequences"] == found["block_sequences"]
    for less, more in itertools.pairwise(points):
        assert less["sequences"] < more["sequences"] and less["tokens_per_second"] < more["tokens_per_second"]
    assert points[-1]["tokens_per_second"] == pytest.approx(found["tokens_per_second"])
    run("plan", MODEL, *options)
    assert len([line for line in capsys.readouterr().out.splitlines() if " at once " in line]) == len(points)


@pytest.fixture
def bare(tmp_path):
    """A config.json without a checkpoint."""
    file = tmp_path / "config.json"
    file.write_text((MODEL / "config.json").read_text())
    return file


def test_the_answer_comes_first_and_then_the_reasons(capsys):
    assert run("plan", MODEL, "--hardware", "t4", "--prompt-len", 128, "--gen-len", 8) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("It fits t4: ") and "token/s" in lines[0] and "written to flash" in lines[0]
    assert any(line.startswith("waits for") for line in lines)


def test_json_states_policy_peaks_and_rates(capsys):
    run("plan", MODEL, "--hardware", "gpu24", "--json", "--prompts", 4, "--gpu-memory", 0.016)
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak_bytes"]["gpu"] <= 0.016e9 == found["limit_bytes"]["gpu"]
    assert found["block_sequences"] <= 4 and found["tokens_per_second"] > 0
    assert found["policy"]["weights"]["gpu"] < 1


def test_a_checkpoints_headers_and_its_config_agree(bare):
    from safetensors.numpy import load_file

    exact, fraction = model_shape(MODEL)
    by_rule, _ = model_shape(bare)
    assert fraction == 1.0
    count = sum(each.size for name, each in load_file(MODEL / "model.safetensors").items() if name != "lm_head.weight")
    assert exact.parameters == count
    assert by_rule.parameters == pytest.approx(count, rel=2e-3)


def test_compressed_checkpoints_are_planned_with_their_bytes(tmp_path):
    torch = pytest.importorskip("torch")
    from nearflash.weights.convert import layer_weights, write_model
    from nearflash.weights.pretrained import load_pretrained

    model, _ = load_pretrained(str(MODEL), "fp32")
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name in layer_weights(model):
                each[:, ::2] = 0
    write_model(model, tmp_path / "small", format="bitmap", bits=16, dtype=torch.float16,
                compressed=layer_weights(model), written=lambda _: None)  # fmt: skip
    (tmp_path / "small" / "config.json").write_text((MODEL / "config.json").read_text())
    shape, fraction = model_shape(tmp_path / "small")
    assert shape.parameters == model_shape(MODEL)[0].parameters and 0.5 < fraction < 0.9


def test_a_plan_is_kept_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    run("plan", MODEL, "--hardware", "t4", "-o", out, "--picture", picture, "--gpu-memory", 0.02)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    kept = read_plan(out)
    kept.check(model_shape(MODEL)[0])
    assert f"kept in {out}" in capsys.readouterr().err


def test_a_file_that_two_options_name_is_rejected(tmp_path):
    """Regression: the curve replaced the plan that had just been kept."""
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with pytest.raises(CommandError, match=r"curve must be another file than output, not '.*link', too"):
        run("plan", MODEL, "--hardware", "t4", "--curve", tmp_path / "link", "-o", tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_a_file_of_a_machine_is_read(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(machine_toml(load_machine("gpu24")).replace('name = "gpu24"', 'name = "mine"'))
    run("plan", MODEL, "--hardware", file)
    assert capsys.readouterr().out.startswith("It fits mine: ")


def test_a_plan_for_ranks_states_the_bytes_of_each(tmp_path, capsys):
    out, options = tmp_path / "plan.json", ("--hardware", "t4", "--gpu-memory", 0.02, "--prompts", 8, "--ranks", 2)
    run("plan", MODEL, *options, "--json", "-o", out)
    found = json.loads(capsys.readouterr().out)
    assert [each["layers"] for each in found["ranks"]] == [[0, 3], [3, 6]]
    tokens = found["block_sequences"] * 32
    for link, size in found["bytes_per_token"].items():
        assert sum(each["bytes"].get(link, 0) for each in found["ranks"]) == pytest.approx(size * tokens)
    assert found["seconds"] == found["seconds_to_first_token"] + found["decode_seconds"]
    assert read_plan(out).ranks == 2
    with pytest.raises(PlanError, match="this one is for 2, not 1; make it again: nearflash plan MODEL --ranks 1"):
        read_plan(out).check(*model_shape(MODEL))
    run("plan", MODEL, *options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("It fits 2 ranks of t4: ")
    assert [line.partition(":")[0] for line in lines if line.startswith("rank ")] == [
        "rank 0 of 2, layers 0 to 2", "rank 1 of 2, layers 3 to 5",
    ]  # fmt: skip
    with pytest.raises(CommandError, match="picture must be left out with ranks"):
        run("plan", MODEL, *options, "--picture", tmp_path / "plan.png")


def test_tune_keeps_the_plan_beside_the_model(bare, tmp_path, capsys):
    with pytest.raises(CommandError, match="must be a folder to keep a plan in"):
        run("tune", bare, "--hardware", "t4")
    assert run("tune", tmp_path, "--hardware", "t4", "--json") == 0
    assert read_plan(tmp_path / PLAN_NAME).machine == "t4"
    assert json.loads(capsys.readouterr().out)["machine"] == "t4"


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (("--hardware", "t5"), PlanError, "machine must be one of gpu24, t4"),
        (("--hardware", "t4", "--gpu-memory", "0.0001"), PlanError, "a model must fit t4: .* GB on gpu"),
        (("--hardware", "t4", "--max-seconds", "1e-9"), PlanError, "max_seconds must be"),
        (("--hardware", "t4", "--prompt-len", "99999999"), PlanError, "at most for this model"),
    ],
)
def test_what_cannot_be_planned_is_refused(argv, error, message):
    with pytest.raises(error, match=message):
        run("plan", MODEL, *argv)


def test_folders_that_are_no_model_are_refused(tmp_path, bare):
    with pytest.raises(PlanError, match=r"model must be a folder with config\.json"):
        run("plan", tmp_path / "none", "--hardware", "t4")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(WeightsError):
        run("plan", tmp_path, "--hardware", "t4")
    bare.write_text("[]")
    with pytest.raises(PlanError, match="must hold an object, not list"):
        run("plan", bare, "--hardware", "t4")


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
def test_budgets_are_numbers_above_zero(value, capsys):
    with pytest.raises(SystemExit):
        run("plan", MODEL, "--gpu-memory", value)
    assert "must be a number above 0" in capsys.readouterr().err


def test_this_machine_is_measured_once(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    from nearflash.offload.machine import measure

    calls = []

    def measured(folder, dtype, model):
        calls.append(dtype)
        return load_machine("gpu24").with_memory(gpu_bytes=1e8, host_bytes=1e8, disk_bytes=1e8)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(measure, "measure_machine", measured)
    monkeypatch.setattr(machine_plan, "idle_processors", lambda: 1)
    monkeypatch.setattr(machine_plan.os, "sched_getaffinity", lambda process: {0, 1})
    for times in (1, 2):  # beside other work, nothing is kept
        with pytest.warns(RuntimeWarning, match="other programs took 1 of 2 processors while .* measured"):
            run("plan", MODEL, "--folder", tmp_path, "--json")
        assert len(calls) == times and not (tmp_path / "state").exists()
    calls.clear()
    capsys.readouterr()
    monkeypatch.setattr(machine_plan, "idle_processors", lambda: 2)
    for expected, hardware in ((1, ()), (1, ()), (2, ("--hardware", "measure"))):
        run("plan", MODEL, "--folder", tmp_path, "--json", *hardware)
        assert calls == ["float16"] * expected
    out, err = capsys.readouterr()
    assert err.count("measuring this machine for the model: half a minute") == 2
    every = [json.loads(line) for line in out.splitlines()]
    assert len(every) == 3 and every[0]["tokens_per_second"] == every[1]["tokens_per_second"]
