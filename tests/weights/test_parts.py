"""The parts of a compressed model's folder belong together, or nothing of it is loaded."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM

from nearflash.abi.errors import WeightsError
from nearflash.cli.main import main
from nearflash.offload.weights.skeleton import open_skeleton
from nearflash.weights.loading import load
from nearflash.weights.parts import REPORT, check_parts
from nearflash.weights.pretrained import load_pretrained

MODEL = Path(__file__).parents[1] / "data/doclm-7m"


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """Two compressions of one model."""
    folders = [tmp_path_factory.mktemp("small") / name for name in ("one", "other")]
    for folder in folders:
        assert main(["compress", str(MODEL), "--method", "none", "-o", str(folder)]) == 0
    return folders


def edit(name, **changes):
    def change(folder, other):
        body = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(body | changes))

    return change


def of_the_other(name):
    return lambda folder, other: shutil.copyfile(other / name, folder / name)


def removed(name):
    return lambda folder, other: (folder / name).unlink()


def added(name, text):
    return lambda folder, other: (folder / name).write_text(text)


REFUSED = {
    "an epsilon in the configuration": (edit("config.json", rms_norm_eps=1e-3), "config.json"),
    "rotary base": (edit("config.json", rope_parameters={"rope_type": "default", "rope_theta": 7.0}), "config.json"),
    "the tokenizer": (edit("tokenizer.json", version="1.1"), "tokenizer.json"),
    "the tokenizer's settings": (edit("tokenizer_config.json", add_bos_token=True), "tokenizer_config.json"),
    "a chat template more": (added("chat_template.jinja", "{{ messages }}"), "chat_template.jinja"),
    "no tokenizer": (removed("tokenizer.json"), "tokenizer.json"),
    "no report": (removed(REPORT), REPORT),
    "weights of another compression": (of_the_other("model.safetensors"), "model.safetensors"),
    "the report of another compression": (of_the_other(REPORT), "model.safetensors"),
    "weights that were not compressed": (
        lambda folder, other: shutil.copyfile(MODEL / "model.safetensors", folder / "model.safetensors"),
        "model.safetensors",
    ),
    "a report without parts": (edit(REPORT, parts=None), REPORT),
    "a report that is none": (added(REPORT, "[]"), REPORT),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_part_of_elsewhere_is_named_and_nothing_loaded(compressed, tmp_path, change):
    shutil.copytree(compressed[0], tmp_path / "small")
    edited, name = REFUSED[change]
    edited(tmp_path / "small", compressed[1])
    for opened in (check_parts, load_pretrained, open_skeleton, lambda folder: load(AutoModelForCausalLM, folder)):
        with pytest.raises(WeightsError, match=rf"{name} must belong to the files beside it, but"):
            opened(tmp_path / "small")


@pytest.mark.parametrize("name", ["generation_config.json", "README.md", "nearflash-plan.json", "notes.txt"])
def test_what_may_be_edited_is_no_part(compressed, tmp_path, name):
    shutil.copytree(compressed[0], tmp_path / "small")
    (tmp_path / "small" / name).write_text("{}")
    check_parts(tmp_path / "small")


def test_weights_that_state_no_report_are_as_they_were(tmp_path):
    check_parts(MODEL)
    check_parts(tmp_path / "none")
    (tmp_path / "model.safetensors").write_text("no weights")
    check_parts(tmp_path)
