import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("scipy")

from nearflash.abi.errors import PlanError
from nearflash.planning.explain import changes, count_written_bytes, explain, one_line, summary, tokens_per_dollar
from nearflash.planning.plan_file import PlanFile, plan_text, read_plan, write_plan
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import DeviceTier, Prices, machine_toml, parse_machine
from nearflash.planning.search import plan_for
from nearflash.planning.terms import Workload


@pytest.fixture
def plan(opt_175b, t4):
    policy = OffloadPolicy(32, 8, Shares(host=0.5, disk=0.5), Shares(disk=1), Shares(host=1), cpu_attention=True)
    return plan_for(opt_175b, t4, Workload(512, 32), policy)


def test_the_first_line_answers(plan):
    line = one_line(plan)
    assert next(iter(explain(plan))) == line
    speed = f"{plan.prediction.tokens_per_second:.3g} token/s over 256 sequences"
    assert line.startswith(f"It fits t4: {speed}") and line.endswith("it waits for disk.")


def test_wear_is_what_the_cache_writes(plan, t4):
    disk, device = count_written_bytes(plan)
    assert disk == pytest.approx(plan.shape.kv_bytes_per_token * 256 * (512 + 31)) and device == 0
    machine = replace(t4, device=DeviceTier("test", 1e13, 1e10, 1e9, 3e9))
    kept = plan_for(plan.shape, machine, plan.workload, replace(plan.policy, cache=Shares(device=1)))
    assert count_written_bytes(kept) == pytest.approx((0, disk))


def test_tokens_a_dollar_are_those_of_time_and_wear(plan, t4):
    assert tokens_per_dollar(plan) is None and summary(plan)["tokens_per_dollar"] is None
    assert not any(line.startswith("price") for line in explain(plan))
    priced = replace(t4, prices=Prices("a list of prices", 3600.0))
    assert parse_machine(machine_toml(priced)) == priced
    found = plan_for(plan.shape, priced, plan.workload, plan.policy)
    assert tokens_per_dollar(found) == pytest.approx(found.prediction.tokens_per_second), "a dollar a second"
    worn = replace(
        priced, prices=Prices("a list of prices", 3600.0, found.prediction.seconds / count_written_bytes(plan)[0])
    )
    half = plan_for(plan.shape, worn, plan.workload, plan.policy)
    assert tokens_per_dollar(half) == pytest.approx(found.prediction.tokens_per_second / 2)
    assert any("tokens a dollar (a list of prices)" in line for line in explain(found))


def test_changes_name_what_it_waits_for_first(plan):
    found = changes(plan)
    assert found[0].what == "disk reads of the cache 1.25 times as fast"
    speeds = [each.tokens_per_second for each in found]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 1.01 * plan.prediction.tokens_per_second


def test_the_text_has_every_tier_phase_and_link(plan):
    text = "\n".join(explain(plan))
    assert "memory at most (gpu: of what computes; without a GPU, a part of the host's)" in text
    for word in (
        "prefill",
        "decode",
        "cache disk to host",
        "gpu  ",
        "host  ",
        "written to disk",
        "50.0% host",
        "of 16.1 GB",
    ):
        assert word in text
    assert "attention on the host" in text


def test_the_summary_is_json_of_the_same_figures(plan):
    found = json.loads(json.dumps(summary(plan)))
    assert found["tokens_per_second"] == plan.prediction.tokens_per_second
    assert found["peak_bytes"]["disk"] == plan.peaks["disk"].peak_bytes and found["bottleneck"] == "disk"


def test_a_plan_survives_its_file(plan, tmp_path):
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    write_plan(plan, file)
    assert file.stat().st_mode & 0o777 == 0o600 and [each.name for each in tmp_path.iterdir()] == ["plan.json"]
    found = read_plan(file)
    assert isinstance(found, PlanFile) and found.policy == plan.policy and found.workload == plan.workload
    assert found.prediction["tokens_per_second"] == plan.prediction.tokens_per_second
    found.check(plan.shape)


def test_a_plan_for_another_model_is_rejected(plan, opt_6_7b, tmp_path):
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    with pytest.raises(PlanError, match="must be for the model that runs it"):
        read_plan(file).check(opt_6_7b)


def test_a_plan_for_weights_stored_otherwise_is_rejected(plan):
    """One for compressed weights filled memory with dense ones."""
    own = PlanFile.of(plan)
    with pytest.raises(PlanError, match=r"for 1\.000 of their dense bytes, the model's take 0\.500"):
        own.check(plan.shape, 0.5)
    own.check(plan.shape, 0.995)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "x", "must have format 'nearflash plan', version 5, not 'x'"),
        (("version",), 1, "must have version 5, not 1; make it again"),
        (("shape_digest",), 3, "shape_digest must be text"),
        (("more",), 1, "plan must have only format, .*, not more"),
        (("workload", "prompt_tokens"), 0, "workload.prompt_tokens must be a whole number"),
        (("workload",), [], r"workload must be a table, not \[\]"),
        (("policy", "batch_size"), 1.5, "policy.batch_size must be a whole number"),
        (("policy", "batch_size"), True, "policy.batch_size must be a whole number"),
        (("policy", "overlap"), 1, "policy.overlap must be true or false"),
        (("policy", "weight_bits"), 5, "bits must be 16 or 4"),
        (("policy", "weights", "gpu"), 2.0, "shares must be between 0 and 1"),
        (("policy", "weights", "gpu"), None, "weights.gpu must be a number, not None"),
        (("policy", "cache", "tape"), 0.0, "cache must have only gpu, .*, not tape"),
        (("prediction", "decode_seconds"), "fast", "decode_seconds must be a number"),
        (("prediction", "peak_bytes"), 3, "peak_bytes must be a table"),
        (("prediction", "bottleneck"), 3, "bottleneck must be text"),
    ],
)
def test_other_files_are_rejected(plan, tmp_path, path, value, message):
    body = json.loads(plan_text(plan))
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(body))
    with pytest.raises(PlanError, match=message):
        read_plan(file)


def test_files_that_are_no_json_are_rejected(plan, tmp_path):
    file = tmp_path / "plan.json"
    for text in ("", "{", "[" * 100000):
        file.write_text(text)
        with pytest.raises(PlanError, match=r"plan\.json must be a readable JSON file"):
            read_plan(file)
    file.write_text(plan_text(plan).replace("0.5", "NaN", 1))
    with pytest.raises(PlanError, match="must be a number, not nan"):
        read_plan(file)
    with pytest.raises(PlanError, match=re.escape(f"{tmp_path / 'no' / 'plan.json'} must be writable")):
        write_plan(plan, tmp_path / "no" / "plan.json")
