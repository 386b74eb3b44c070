"""Calibrated policies: files hold what was written, and every shipped one is whole."""

import json
import subprocess
import sys

import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.inference.policy import calibrated as module
from nearflash.inference.policy.calibrated import calibrated, calibrated_names, write_calibrated
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout


def test_a_file_holds_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FOLDER", tmp_path / "new")
    layout = KvLayout(32, False, 512, IndexFormat.INT4, 8192)
    heads = {
        (layer, head): AttentionPolicy("sparf-page", 8 + layer, top_k=0.4, top_p=0.5 + head / 8, local_window=32)
        for layer in range(3) for head in range(2)
    }  # fmt: skip
    policy = AttentionPolicy("sparf-page", top_k=0.4, local_window=32, overrides=heads)
    path = write_calibrated("some-model", policy, layout, "a test")
    assert json.loads(path.read_text())["made_by"] == "a test"
    assert calibrated_names() == ["some-model"]
    assert calibrated("some-model") == (policy, layout)
    with pytest.raises(CommandError, match="model must be one of some-model, not 'other'"):
        calibrated("other")


@pytest.mark.parametrize("model", calibrated_names())
def test_shipped_policies_fit_their_layout(model):
    policy, layout = calibrated(model)
    assert {own.mode for own in policy.overrides.values()} == {"sparf-page"}
    assert all(0.5 <= own.top_p < 1 and 1 <= own.score_dims <= 128 for own in policy.overrides.values())
    assert layout.page_bytes == 4096


def test_calibrated_policies_load_no_torch():
    code = "import sys, nearflash.inference.policy.calibrated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
