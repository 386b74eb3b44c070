"""What users keep: a full drive, or power lost, leaves the file of before, and no pipe in its place is waited for."""

import json
import os
import stat

import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import NearflashError
from nearflash.inference.calibration.calibration import Calibration
from nearflash.inference.policy.files import PolicyFile
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.offload.machine import machine_file
from nearflash.offload.results import Results
from nearflash.planning.plan_file import read_plan, write_plan
from nearflash.planning.profile import load_machine
from nearflash.planning.search import Space, search
from nearflash.planning.shapes import from_config
from nearflash.planning.terms import Workload
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import find_profile, keep_profile
from nearflash.storage.kv import KvLayout
from nearflash.support.timeline import Timeline

LAYOUT = KvLayout(16, True, 1024, IndexFormat.INT4, 4096)
OPT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 256, "vocab_size": 97,
       "max_position_embeddings": 64, "word_embed_proj_dim": 64, "activation_function": "relu"}  # fmt: skip


def write_a_plan(path):
    found = search(from_config(OPT), load_machine("t4"), Workload(8, 4), Space(max_sequences=1))
    write_plan(found, path)


def write_a_policy(path):
    own = AttentionPolicy("sparf-page", 8, top_k=0.4, top_p=0.5, local_window=32)
    policy = AttentionPolicy("sparf-page", top_k=0.4, local_window=32, overrides={(0, 0): own})
    PolicyFile("m", "0" * 16, policy, LAYOUT, 0.1, 0.001, "a test").write(path)


def write_rates(path):
    keep_profile(path.parent, [Rate("read", 4096, 1, 1.0, 1.0, 1.0)], "2026-01-01", path)


def write_progress(path):
    Calibration(LAYOUT, (4,)).save(path, "key")


def write_a_trace(path):
    Timeline().write(path)


WRITERS = [write_a_plan, write_a_policy, write_rates, write_progress, write_a_trace]


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_drive_leaves_the_file_of_before(write, tmp_path, monkeypatch):
    """Calibration had written over its only progress, the others had renamed what was not on the drive yet."""
    path = tmp_path / "kept"
    write(path)
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((NearflashError, OSError), match="No space left"):
        write(path)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_a_machines_profile_is_kept_as_durably(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = machine_file.keep_machine(load_machine("t4"), tmp_path, None)
    before, flushed = file.read_bytes(), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_mode))
    machine_file.keep_machine(load_machine("t4"), tmp_path, None)
    assert [stat.S_ISDIR(mode) for mode in flushed] == [False, True] and file.read_bytes() == before


@pytest.mark.parametrize("read", [read_plan, PolicyFile.read, load_machine, lambda path: Results(path, [], {}),
                                  lambda path: find_profile(path.parent, path),
                                  lambda path: Calibration(LAYOUT, (4,)).resume(path, "key")])  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "folder", "binary", "deep", "huge", "long number"])
def test_what_is_no_such_file_is_named_and_never_waited_for(read, kind, tmp_path):
    path = tmp_path / "kept"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as out:
            out.truncate(10**12)
    else:
        path.write_text({"binary": "\x00\x80\xff" * 99, "deep": "[" * 99_999, "long number": "9" * 9999}[kind])
    with pytest.raises(NearflashError, match="kept"):
        read(path)


def test_a_trace_of_the_expected_form(tmp_path):
    write_a_trace(tmp_path / "kept")
    assert json.loads((tmp_path / "kept").read_text())["traceEvents"] == []
