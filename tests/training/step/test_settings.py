"""Options: one place that defines them, shown by help(), rejected by name, and what is made of those left out."""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest
import torch

from nearflash import training
from nearflash.abi.errors import CommandError
from nearflash.storage.state.manifest import EXTENT_PARAMS
from nearflash.training.gradients.compression import TopK
from nearflash.training.step.settings import (
    CACHED_EXTENT_PARAMS,
    NARROW_EXTENT_PARAMS,
    TORCH_FLAGS,
    Options,
    StepSettings,
)

KINDS = ["NearStorageAdam", "NearStorageAdamW", "NearStorageSGD", "NearStorageAdagrad", "NearStorageLion"]
GUIDE = Path(__file__).parents[3] / "docs" / "reference" / "optimizers.md"


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({}, CACHED_EXTENT_PARAMS),
        ({"overlap": "backward"}, CACHED_EXTENT_PARAMS),
        ({"state_format": "mx8"}, NARROW_EXTENT_PARAMS),
        ({"state_format": "bf16", "compression": TopK(0.01)}, NARROW_EXTENT_PARAMS),
        ({"compression": TopK(0.01)}, EXTENT_PARAMS),
        ({"resident_bytes": 1}, EXTENT_PARAMS),
        ({"resident_bytes": 1, "extent_params": 2048}, 2048),
    ],
)
def test_extents_are_small_where_the_drive_sets_the_pace_by_default(tmp_path, given, params):
    assert StepSettings(path=tmp_path, **given).new_extent_params == params


def test_options_are_the_fields_of_settings():
    """The names and types that editors and type checkers see are those that are checked at run time."""
    declared, checked = typing.get_type_hints(Options), typing.get_type_hints(StepSettings)
    assert {name: kind for name, kind in declared.items() if name not in TORCH_FLAGS} == checked
    assert set(declared) == {*checked, *TORCH_FLAGS} and Options.__required_keys__ == {"path"}


@pytest.mark.parametrize("name", KINDS)
def test_help_lists_every_option(name):
    kind = getattr(training, name)
    parameters = inspect.signature(kind).parameters
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for field in dataclasses.fields(StepSettings):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        assert (
            parameters[field.name].default == default and parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        )
        assert f"{field.name}: {field.metadata['doc']}" in kind.__doc__
    assert kind.__doc__.startswith(("torch.optim", "Lion"))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"path": "x", "momentun": 0.9},
            r"NearStorageAdamW\(\) got an unexpected keyword argument 'momentun'; its opt",
        ),
        ({}, r"NearStorageAdamW\(\) missing the required keyword argument 'path'"),
    ],
)
def test_wrong_keywords_are_type_errors(options, message):
    with pytest.raises(TypeError, match=message):
        training.NearStorageAdamW([torch.nn.Parameter(torch.ones(3))], **options)


def test_an_empty_path_is_no_place(tmp_path, monkeypatch):
    """It was the current folder, which nobody had named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="path must be a name that a file can have, not ''"):
        training.NearStorageAdamW([torch.nn.Parameter(torch.ones(3))], path="")
    assert not list(tmp_path.iterdir())


def table():
    """The options as the guide shows them."""
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for field in dataclasses.fields(StepSettings):
        default = field.default
        shown = (
            "required"
            if default is dataclasses.MISSING
            else f"`{str(default)!r}`"
            if isinstance(default, str)
            else f"`{default!r}`"
        )
        yield f"| `{field.name}` | {shown} | {field.metadata['doc']} |"


def test_the_guide_has_the_table():
    found = re.findall(
        r"^\|.*\|$", GUIDE.read_text().partition("<!-- options -->")[2].partition("<!-- end -->")[0], re.M
    )
    assert found == list(table()), "put this into docs/reference/optimizers.md:\n" + "\n".join(table())
