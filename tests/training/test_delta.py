"""`optimizer.delta`: equal to a comparison of full copies, durable with the step that it belongs to, or refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearflash.abi.errors import CommandError, StateError, StorageFullError
from nearflash.cli.main import main
from nearflash.storage import StateStore
from nearflash.storage.state.delta_log import DeltaLog, log_folder, read_deltas
from nearflash.storage.state.weight_patch import WeightPatch, apply_patch, publish_patch
from nearflash.training import NearStorageAdamW, NearStorageMuon, TopK
from nearflash.training.step.transfer import Transfer

ROOM = 1 << 24
DATA = Path(__file__).parents[1] / "data"


def make_weights(dtype=torch.bfloat16):
    """bf16 weights over several extents and tiles, one in fp32, an empty one, a scalar, and one that strides."""
    generator = torch.Generator().manual_seed(11)
    shapes = [(70, 91), (33,), (0,), (), (13, 5)]
    weights = [torch.nn.Parameter((torch.randn(s, generator=generator) * 0.02).to(dtype)) for s in shapes]
    weights[1].data = weights[1].data.float()
    weights[4].data = weights[4].data.repeat(1, 2)[:, ::2]
    return weights


def put_gradients(weights, step):
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def words_of(weights):
    kinds = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
    return [
        w.detach().reshape(-1).clone().view(kinds[w.element_size()][0]).numpy().view(kinds[w.element_size()][1])
        for w in weights
    ]


def open_optimizer(path, weights, **options):
    options = {"lr": 1e-4, "extent_params": 1024, "delta_bytes": ROOM, "direct": False} | options
    named = [(f"w{index}", weight) for index, weight in enumerate(weights)]
    return NearStorageAdamW(named, path=path, **options)


def apply(delta, copy):
    """A full copy (of each tensor its words) after a delta."""
    after = [words.copy() for words in copy]
    for name, changes in delta.changes.items():
        after[int(name[1:])][changes.indices] = changes.words
    return after


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def train(optimizer, weights, steps, copies):
    for _ in range(steps):
        put_gradients(weights, optimizer.steps)
        optimizer.step()
        copies.append(words_of(weights))


@pytest.mark.parametrize(
    ("lr", "overlap"), [(1e-5, "backward"), (1e-4, "step"), pytest.param(1e-6, "step", marks=pytest.mark.full)]
)
def test_deltas_over_50_steps_equal_full_copies(tmp_path, lr, overlap):
    weights = make_weights()
    copies = [words_of(weights)]
    with open_optimizer(tmp_path / "state", weights, lr=lr, overlap=overlap, max_grad_norm=1.0) as optimizer:
        follower = copies[0]
        for step in range(1, 51):
            train(optimizer, weights, 1, copies)
            one = optimizer.delta(since=step - 1)
            follower = apply(one, follower)
            assert_same(follower, copies[step])
        for since in (0, 7, 49, 50):
            assert_same(apply(optimizer.delta(since=since), copies[since]), copies[50])
        least = sum(int((a != b).sum()) for a, b in zip(copies[49], copies[50], strict=True))
        assert one.words >= least > 0 and one.size_bytes < 4 * sum(w.nbytes for w in copies[50])
        assert optimizer.report.traffic.delta_bytes > one.size_bytes


def test_one_step_of_bf16_changes_no_more_than_what_differs(tmp_path):
    weights = [torch.nn.Parameter((torch.randn(40_000) * 0.1).bfloat16())]
    before = words_of(weights)[0]
    with open_optimizer(tmp_path / "state", weights, lr=1e-5, extent_params=8192) as optimizer:
        train(optimizer, weights, 1, [])
        delta = optimizer.delta(since=0)
    np.testing.assert_array_equal(delta.changes["w0"].indices, np.flatnonzero(before != words_of(weights)[0]))
    assert 0 < delta.words < 4000 and delta.size_bytes < 2 * 4 * delta.words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lr", "overlap"), [(1e-5, "backward"), (1e-4, "step"), pytest.param(1e-6, "step", marks=pytest.mark.full)]
)
def test_weights_from_deltas_are_those_of_whole_copies(tmp_path, monkeypatch, dtype, lr, overlap):
    """50 steps; the device sends what changes, and where it cannot, the copy: the same weights, the same deltas."""
    runs, up, merged = [], [], []
    for writes in (True, False):
        monkeypatch.setattr(Transfer, "writes_delta", writes)
        weights = [
            torch.nn.Parameter((torch.randn(n, generator=torch.manual_seed(n)) * 0.1).to(dtype)) for n in (9000, 70)
        ]
        runs.append([])
        options = {"lr": lr, "overlap": overlap, "max_grad_norm": 1.0, "extent_params": 4096}
        with open_optimizer(tmp_path / str(writes), weights, **options) as optimizer:
            train(optimizer, weights, 50, runs[-1])
            up.append(optimizer.report.traffic.from_device_bytes)
            merged.append(optimizer.delta(since=10).changes)
    for mine, theirs in zip(*runs, strict=True):
        assert_same(mine, theirs)
    for name, changes in merged[0].items():
        assert_same([changes.indices, changes.words], [merged[1][name].indices, merged[1][name].words])
    assert up[0] <= up[1] * (1.03 if lr > 1e-5 else 0.3 if dtype is torch.bfloat16 else 1.03)


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [(None, 2.0, 2.2), (TopK(0.01, saved=False, warmup_steps=0), 0.04, 0.2)],
    ids=["dense", "topk"],
)
def test_a_model_takes_few_bytes_back(tmp_path, compression, least, most):
    """Link bytes a parameter at learning rate 1e-5: the gradients down, in bf16 or 1 % of them, and what changes up."""
    model = AutoModelForCausalLM.from_pretrained(DATA / "doclm-7m", dtype=torch.bfloat16)
    tokens = AutoTokenizer.from_pretrained(DATA / "doclm-7m")((DATA / "finetune.txt").read_text())["input_ids"]
    options = {"lr": 1e-5, "state_format": "mx8", "max_grad_norm": 1.0, "extent_params": None}
    options["compression"] = compression
    with open_optimizer(tmp_path / "state", list(model.parameters()), **options) as optimizer:
        traffic, params = optimizer.report.traffic, sum(weight.numel() for weight in model.parameters())
        for step in range(3):
            before = traffic.host_link_bytes, traffic.from_device_bytes
            ids = torch.tensor([tokens[64 * step :][:64]])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            both, up = traffic.host_link_bytes - before[0], traffic.from_device_bytes - before[1]
            assert least <= both / params <= most and up / params <= 0.2
            print(f"{both / params:.3f} bytes a parameter, {up / params:.3f} of them up")


def test_another_process_resumes_and_the_chain_goes_on(tmp_path):
    weights = make_weights()
    copies = [words_of(weights)]
    with open_optimizer(tmp_path / "state", weights) as optimizer:
        train(optimizer, weights, 3, copies)
    again = make_weights()
    with open_optimizer(tmp_path / "state", again, resume=True) as optimizer:
        assert_same(apply(optimizer.delta(since=1), copies[1]), copies[3])
        train(optimizer, again, 2, copies)
        assert_same(apply(optimizer.delta(since=1), copies[1]), copies[5])


def test_a_step_that_fails_to_commit_leaves_no_delta(tmp_path, monkeypatch):
    weights = make_weights()
    copies = [words_of(weights)]
    with open_optimizer(tmp_path / "state", weights) as optimizer:
        train(optimizer, weights, 2, copies)
        with monkeypatch.context() as broken, pytest.raises(OSError, match="pulled"):
            broken.setattr(StateStore, "commit", lambda *_, **__: (_ for _ in ()).throw(OSError("pulled")))
            train(optimizer, weights, 1, copies)
        assert (log_folder(tmp_path / "state") / "step-00000003.delta").exists()
        assert_same(apply(optimizer.delta(since=0), copies[0]), copies[2])
        with pytest.raises(StateError, match="since must be a step from 0 to 2"):
            optimizer.delta(since=3)
        for since in (-1, 1.5, True, "1", None):
            with pytest.raises(StateError, match="since must be a step, a whole number from 0 on, not"):
                optimizer.delta(since=since)
        put_gradients(weights, 77)
        optimizer.step()
        assert_same(apply(optimizer.delta(since=1), copies[1]), words_of(weights))


def test_no_room_for_a_delta_ends_the_step_before_it_counts(tmp_path, monkeypatch):
    weights = make_weights()
    with open_optimizer(tmp_path / "state", weights) as optimizer:
        before = words_of(weights)
        monkeypatch.setattr(DeltaLog, "write", lambda *_: (_ for _ in ()).throw(StorageFullError("no room")))
        with pytest.raises(StorageFullError, match="no room"):
            train(optimizer, weights, 1, [])
        assert_same(words_of(weights), before)
        assert optimizer.steps == 0


def test_what_is_not_kept_is_refused(tmp_path):
    weights = make_weights()
    copies = [words_of(weights)]
    with open_optimizer(tmp_path / "state", weights, delta_bytes=60_000) as optimizer:
        train(optimizer, weights, 12, copies)
        folder = log_folder(tmp_path / "state")
        kept = sorted(int(path.stem.removeprefix("step-")) for path in folder.iterdir())
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 60_000
        assert kept[-1] == 12 and kept[0] > 1
        assert_same(apply(optimizer.delta(since=kept[0] - 1), copies[kept[0] - 1]), copies[12])
        with pytest.raises(StateError, match=f"since must be at least {kept[0] - 1}, not 0"):
            optimizer.delta(since=0)
    with open_optimizer(tmp_path / "tiny", make_weights(), delta_bytes=100) as optimizer:
        train(optimizer, [p for g in optimizer.param_groups for p in g["params"]], 1, [])
        with pytest.raises(StateError, match="since must be at least 1, not 0"):
            optimizer.delta(since=0)
    with open_optimizer(tmp_path / "none", [weight := torch.nn.Parameter(torch.ones(64))], delta_bytes=0) as optimizer:
        weight.grad = torch.ones(64)
        optimizer.step()
        with pytest.raises(StateError, match=r"none\.deltas must be there.* give the optimizer delta_bytes"):
            read_deltas(optimizer._optimizer_state.store, 0)
        with pytest.raises(StateError, match="delta_bytes must be given"):
            optimizer.delta(since=0)
    with pytest.raises(CommandError, match="delta_bytes must be at least 0"):
        open_optimizer(tmp_path / "less", make_weights(), delta_bytes=-1)


def test_rollback_and_accepted_weights_begin_another_history(tmp_path):
    weights = make_weights()
    copies = [words_of(weights)]
    with open_optimizer(tmp_path / "state", weights) as optimizer:
        train(optimizer, weights, 3, copies)
        optimizer.rollback()
        assert_same(apply(optimizer.delta(since=0), copies[0]), copies[2])
        put_gradients(weights, 55)
        optimizer.step()
        assert_same(apply(optimizer.delta(since=0), copies[0]), words_of(weights))
        with torch.no_grad():
            weights[0].mul_(1.5)
        optimizer.accept_parameters()
        for since in (0, 3):
            with pytest.raises(StateError, match="since must be above 3"):
                optimizer.delta(since=since)
        train(optimizer, weights, 1, copies)
        with pytest.raises(StateError, match="since must be above 3"):
            optimizer.delta(since=3)
        fourth = words_of(weights)
        train(optimizer, weights, 1, copies)
        assert_same(apply(optimizer.delta(since=4), fourth), words_of(weights))


def test_weights_of_this_very_step_that_were_loaded_again_keep_the_chain(tmp_path):
    weights = make_weights()
    copies = [words_of(weights)]
    with open_optimizer(tmp_path / "state", weights, overlap="backward") as optimizer:
        train(optimizer, weights, 1, copies)
        with torch.no_grad():
            weights[0].copy_(weights[0].clone())
        train(optimizer, weights, 1, copies)
        assert_same(apply(optimizer.delta(since=0), copies[0]), copies[2])


@pytest.mark.parametrize("harm", ["flip", "cut", "another"])
def test_a_damaged_file_is_refused(tmp_path, harm):
    weights = make_weights()
    with open_optimizer(tmp_path / "state", weights) as optimizer:
        train(optimizer, weights, 2, [])
        first, second = sorted(log_folder(tmp_path / "state").iterdir())
        content = bytearray(second.read_bytes())
        content[-30] ^= 1
        second.write_bytes({"flip": content, "cut": content[:-8], "another": first.read_bytes()}[harm])
        with pytest.raises(StateError):
            optimizer.delta(since=0)


KILLED = """
import faulthandler, sys
faulthandler.dump_traceback_later(100, exit=True)
sys.path.insert(0, {tests!r})
from test_delta import *
weights = make_weights()
with open_optimizer({path!r}, weights, resume="auto", lr=1e-4) as optimizer:
    print(optimizer.steps, flush=True)
    while True:
        train(optimizer, weights, 1, [])
        print(optimizer.steps, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("kills", [12])
def test_killed_steps_leave_no_half_version(tmp_path, kills):
    rng = np.random.default_rng(kills)
    reference, copies = make_weights(), []
    copies.append(words_of(reference))
    text = KILLED.format(tests=str(Path(__file__).parent), path=str(tmp_path / "state"))
    with open_optimizer(tmp_path / "whole", reference) as whole:
        for _ in range(kills):
            child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
            assert child.stdout is not None
            assert child.stdout.readline() and child.stdout.readline()
            time.sleep(float(rng.random()) * 0.05)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
            weights = make_weights()
            with open_optimizer(tmp_path / "state", weights, resume=True) as optimizer:
                step = optimizer.steps
                train(whole, reference, max(0, step - whole.steps), copies)
                assert_same(words_of(weights), copies[step])
                for since in {0, step // 2, step - 1, step}:
                    assert_same(apply(optimizer.delta(since=since), copies[since]), copies[step])


def test_the_command_publishes_and_a_checkpoint_follows(tmp_path, capsys):
    weights = make_weights()
    copies = [words_of(weights)]
    state, folder = tmp_path / "state", tmp_path / "versions"
    with open_optimizer(state, weights) as optimizer:
        train(optimizer, weights, 3, copies)
    assert main(["state", "delta", str(state), "--to", str(folder), "--buffered"]) == 0
    assert "version 3 from 0" in capsys.readouterr().out
    again = make_weights()
    with open_optimizer(state, again, resume=True) as optimizer:
        train(optimizer, again, 2, copies)
        publish_patch(optimizer.delta(since=3), folder)
    follower = {f"w{i}": w.reshape(again[i].shape).copy() for i, w in enumerate(copies[0])}
    for version in (3, 5):
        apply_patch(WeightPatch.open(folder, version), follower)
        assert_same([words.reshape(-1) for words in follower.values()], copies[version])


def test_matrices_of_muon_come_as_deltas(tmp_path, monkeypatch):
    """Parts of its runs are updated by themselves: the same weights and deltas as with whole copies."""
    runs, merged = [], []
    for writes in (True, False):
        monkeypatch.setattr(Transfer, "writes_delta", writes)
        weights = [torch.nn.Parameter((torch.randn(s, generator=torch.manual_seed(3)) * 0.02).bfloat16())
                   for s in ((40, 90), (33, 64))]  # fmt: skip
        named = [(f"w{index}", weight) for index, weight in enumerate(weights)]
        options = {"lr": 1e-3, "extent_params": 1024, "delta_bytes": ROOM, "direct": False}
        runs.append([])
        with NearStorageMuon(named, path=tmp_path / str(writes), **options) as optimizer:
            train(optimizer, weights, 3, runs[-1])
            merged.append(optimizer.delta(since=1).changes)
    for mine, theirs in zip(*runs, strict=True):
        assert_same(mine, theirs)
    for name, changes in merged[0].items():
        assert_same([changes.indices, changes.words], [merged[1][name].indices, merged[1][name].words])
