"""Options of weights are rejected alike by the command and by a script, each by its own names."""

import re
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.offload import OffloadedModel
from nearflash.offload.weights.options import check_weight_options
from nearflash.planning.policy import OffloadPolicy, Shares

DISK = OffloadPolicy(1, 1, Shares(disk=1), Shares(host=1), Shares(gpu=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expand_device": "model", "expert_bytes": 1},
            "expert_bytes must be left out with expand_device: experts are",
        ),
        ({"expand_device": "model", "weights_paths": [Path("a")]}, "weights_paths must be left out with expand_device"),
        ({"weights_ratio": [2, 1]}, "weights_ratio must have a number for each weights_paths"),
        ({"weights_paths": [Path("a")], "weights_ratio": [2, 1]}, "weights_ratio must have a number for each"),
    ],
)
def test_a_script_is_told_its_own_names_before_anything_is_opened(tmp_path, options, message):
    with pytest.raises(CommandError, match=re.escape(message)):
        OffloadedModel(tmp_path, DISK, **options)


def test_a_command_is_told_its_options():
    with pytest.raises(CommandError, match="expert_memory must be left out"):
        check_weight_options((), None, expands=True, caches_experts=True, experts_name="expert_memory")
    check_weight_options([Path("a")], [2], expands=False, caches_experts=True)
