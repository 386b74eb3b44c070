"""What scripts change on purpose: frozen tensors thawed, groups added, weights written, older steps restored."""

import gc
import os
import sys
import time

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, NearflashError, NonFiniteError, StateError, StorageFullError
from nearflash.storage import StateStore
from nearflash.training import NearStorageAdagrad, NearStorageAdamW, NearStorageSGD
from nearflash.training.gradients.compression import TopK

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = ((70, 30), (30,), (500, 7), (), (5, 7, 11))


def model(seed=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def backward(tensors, step):
    """By autograd, of those that want a gradient."""
    generator = torch.Generator().manual_seed(step)
    factors = [torch.randn(tensor.shape, generator=generator) for tensor in tensors]
    trained = [(t.float() * f).sum() for t, f in zip(tensors, factors, strict=True) if t.requires_grad]
    torch.stack(trained).sum().backward()


def run(tensors, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(tensors, step)
        optimizer.step()


def near(one, other, **bounds):
    bounds = {"rtol": 1e-5, "atol": 1e-6} | bounds
    return all(torch.allclose(a, b, **bounds) for a, b in zip(one, other, strict=True))


# Frozen tensors


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_frozen_tensors_cost_nothing_and_thaw_as_torchs(open_optimizer, overlap, resident_bytes):
    """All of them were read and written each step, 24 bytes a parameter."""
    ours, theirs = model(), model()
    for each in (ours, theirs):
        for index in (0, 2):
            each[index].requires_grad_(False)
    optimizer = open_optimizer(ours, overlap=overlap, resident_bytes=resident_bytes, **OPTIONS)
    reference = torch.optim.AdamW(theirs, **OPTIONS)
    traffic = optimizer.report.traffic
    for tensors, each in ((ours, optimizer), (theirs, reference)):
        run(tensors, each, range(3))
    assert len(optimizer.store.manifest.tensors) == 3
    assert traffic.flash_written_bytes == 3 * 12 * optimizer.store.manifest.params
    for tensors, each in ((ours, optimizer), (theirs, reference)):
        tensors[2].requires_grad_(True)
        run(tensors, each, range(3, 6))
        tensors[4].requires_grad_(False)
        run(tensors, each, range(6, 9))
        tensors[0].requires_grad_(True)
        tensors[4].requires_grad_(True)
        run(tensors, each, range(9, 12))
    assert near(ours, theirs) and optimizer.steps == 12
    assert optimizer.store.tensor_steps == (3, 12, 9, 12, 9) and optimizer.store.verify() == []
    assert [entry.name for entry in optimizer.store.manifest.tensors] == [f"0.{index}" for index in range(5)]
    assert optimizer.report.mispredictions == 0
    state = optimizer.full_state_dict()["state"]
    for index, tensor in enumerate(theirs):
        expected = reference.state[tensor]
        assert set(state[index]) == set(expected) and state[index]["step"] == expected["step"]
        for name, values in expected.items():
            assert torch.allclose(state[index][name], values, rtol=1e-4, atol=1e-6), name


def test_extents_without_a_gradient_are_left_alone(open_optimizer):
    tensors = [torch.nn.Parameter(torch.ones(4096)) for _ in range(3)]
    optimizer = open_optimizer(tensors, extent_params=1024)
    for step, without in enumerate([(), (0, 2), (1,), ()]):
        for index, tensor in enumerate(tensors):
            tensor.grad = None if index in without else torch.full((4096,), 1.0 + step)
        before = optimizer.report.traffic.flash_written_bytes
        optimizer.step()
        assert optimizer.report.traffic.flash_written_bytes - before == 12 * 4096 * (3 - len(without))
    assert optimizer.store.tensor_steps == (3, 3, 3) and optimizer.store.verify() == []
    optimizer.rollback()
    assert optimizer.store.tensor_steps == (2, 2, 2) and optimizer.store.verify() == []


@pytest.mark.parametrize("residual", ["fp32", "int4"])
def test_thawing_with_compression_and_narrow_state(tmp_path, residual):
    """Scales and residuals are carried, too: the same bits as of an optimizer that had all from the start."""
    found = []
    for thawed_late in (False, True):
        tensors = model(dtype=torch.bfloat16)
        options = {
            "state_format": "mx8", "param_dtype": "bf16", "extent_params": 1024,
            "compression": TopK(0.25, residual=residual, warmup_steps=0),
        }  # fmt: skip
        for index in (1, 2):
            tensors[index].requires_grad_(not thawed_late)
        with NearStorageAdamW(tensors[3:] + tensors[:3], path=tmp_path / str(thawed_late), **options) as optimizer:
            for index in (1, 2):
                tensors[index].requires_grad_(False)
            run(tensors, optimizer, range(3))
            for index in (1, 2):
                tensors[index].requires_grad_(True)
            run(tensors, optimizer, range(3, 6))
            arrays = {a.name: optimizer.store.read_array(a.name) for a in optimizer.store.manifest.arrays}
            assert optimizer.store.tensor_steps == (6, 6, 6, 3, 3)
        found.append(([tensor.detach().clone() for tensor in tensors], arrays))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    for name, values in found[0][1].items():
        assert np.array_equal(values, found[1][1][name]), name


def test_resume_with_frozen_and_thawed_tensors(open_optimizer, tmp_path):
    """State is found by name, also of tensors that are frozen now; a trained one without state is another model's."""
    tensors = model()
    tensors[0].requires_grad_(False)
    optimizer = open_optimizer(tensors)
    run(tensors, optimizer, range(2))
    optimizer.close()
    tensors[2].requires_grad_(False)
    resumed = open_optimizer(tensors, resume=True)
    assert [entry.name for entry in resumed.store.manifest.tensors] == ["0.1", "0.2", "0.3", "0.4"]
    run(tensors, resumed, [2])
    assert resumed.store.tensor_steps == (3, 2, 3, 3)
    resumed.close()
    tensors[0].requires_grad_(True)
    with pytest.raises(StateError, match=r"parameters must be those of .*; freeze .*, construct, then thaw it"):
        open_optimizer(tensors, resume=True)


def test_a_thaw_that_fails_changes_nothing(open_optimizer, monkeypatch):
    tensors = model()
    tensors[0].requires_grad_(False)
    optimizer = open_optimizer(tensors, overlap="backward")
    run(tensors, optimizer, range(2))
    content, values = optimizer.store.path.read_bytes(), [tensor.detach().clone() for tensor in tensors]

    def unchanged():
        assert optimizer.store.path.read_bytes() == content and optimizer.steps == 2
        assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
        assert list(optimizer.store.path.parent.iterdir()) == [optimizer.store.path]

    tensors[0].requires_grad_(True)
    optimizer.zero_grad()
    backward(tensors, 2)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageFullError):
            optimizer.step()
    unchanged()
    gradient, tensors[0].grad = tensors[0].grad, torch.eye(70)[:, :30].to_sparse()
    with pytest.raises(NearflashError, match=r"gradient of '0.0' must be dense"):
        optimizer.step()
    unchanged()
    tensors[0].grad = torch.full((70, 30), float("nan"))
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert optimizer.steps == 2 and all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
    tensors[0].grad = gradient
    optimizer.step()
    assert optimizer.steps == 3 and optimizer.store.verify() == []


# Groups


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_groups_added_after_steps(tmp_path, kind, overlap):
    """Refused before: the layout was fixed with the first step."""
    mine, theirs, options, more = {
        "AdamW": (NearStorageAdamW, torch.optim.AdamW, OPTIONS, {"lr": 0.05}),
        "SGD": (NearStorageSGD, torch.optim.SGD, {"lr": 1e-2}, {"momentum": 0.9}),
        "Adagrad": (NearStorageAdagrad, torch.optim.Adagrad, {"lr": 1e-2}, {}),
    }[kind]
    ours, others = model(), model()
    common = {"path": tmp_path / "state", "extent_params": 1024, "overlap": overlap}
    with mine(ours[:2], **common, **options) as optimizer:
        optimizer.metadata["cursor"] = {1: 2}
        reference = theirs(others[:2], **options)
        for tensors, each in ((ours, optimizer), (others, reference)):
            run(tensors[:2], each, range(2))
            each.add_param_group({"params": tensors[2:4], **more})
            run(tensors[:4], each, range(2, 4))
            each.add_param_group({"params": tensors[4:]})
            run(tensors, each, range(4, 6))
        assert near(ours, others) and optimizer.steps == 6
        identity = optimizer.store.identity
    with torch.no_grad():
        for tensor in ours:
            tensor.zero_()
    groups = [{"params": ours[:2]}, {"params": ours[2:4], **more}, {"params": ours[4:]}]
    with mine(groups, resume=True, **common, **options) as resumed:
        assert near(ours, others) and resumed.store.identity == identity and resumed.steps == 6
        assert resumed.metadata == {"cursor": {1: 2}}
        for tensors, each in ((ours, resumed), (others, reference)):
            run(tensors, each, [6])
    assert near(ours, others)


def test_a_group_that_does_not_fit_changes_nothing(open_optimizer):
    tensors = model()
    optimizer = open_optimizer(tensors[:2])
    run(tensors[:2], optimizer, range(2))
    content = optimizer.store.path.read_bytes()
    for group, error in (
        ({"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]}, NearflashError),
        ({"params": tensors[2:], "lr": -1.0}, CommandError),
        ({"params": tensors[2:], "betas": 3}, CommandError),
        ({"params": tensors[:1]}, ValueError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1 and optimizer.store.path.read_bytes() == content
    with torch.no_grad():
        tensors[0].add_(1.0)
    with pytest.raises(StateError, match=r"parameter '0.0' must be changed by this optimizer only.*accept_parameters"):
        optimizer.add_param_group({"params": tensors[2:]})
    assert len(optimizer.param_groups) == 1 and optimizer.store.path.read_bytes() == content


# Weights written on purpose


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_accepted_weights_are_as_torchs(open_optimizer, tmp_path, overlap, resident_bytes):
    """Clamped after each step, durably and not counted as a step."""
    ours, theirs = model(), model()
    options = OPTIONS | {"overlap": overlap, "resident_bytes": resident_bytes, "loss_scale": "dynamic"}
    optimizer, reference = open_optimizer(ours, **options), torch.optim.AdamW(theirs, **OPTIONS)
    optimizer.metadata["cursor"] = 7
    for step in range(4):
        for tensors, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            scale = optimizer.loss_scale if each is optimizer else 1.0
            backward(tensors, step)
            if each is optimizer:
                for tensor in tensors:
                    tensor.grad.mul_(scale)
            each.step()
            with torch.no_grad():
                for tensor in (tensors[0], tensors[3]):
                    tensor.clamp_(-0.1, 0.1)
        optimizer.accept_parameters()
        assert optimizer.steps == step + 1
    optimizer.accept_parameters()
    assert near(ours, theirs) and optimizer.store.tensor_steps == (4,) * 5 and optimizer.store.verify() == []
    good_steps = optimizer._runner.loss_scale.good_steps
    optimizer.close()
    clamped = [tensor.detach().clone() for tensor in ours]
    with torch.no_grad():
        ours[0].zero_()
    resumed = open_optimizer(ours, resume=True, **options)
    assert resumed.steps == 4 and all(torch.equal(a, b) for a, b in zip(ours, clamped, strict=True))
    assert resumed.metadata == {"cursor": 7} and resumed._runner.loss_scale.good_steps == good_steps == 4


def test_masters_that_a_low_precision_tensor_still_has_stay(open_optimizer):
    tensors = [torch.nn.Parameter(torch.randn(3000).bfloat16()) for _ in range(2)]
    optimizer = open_optimizer(tensors, param_dtype="bf16")
    run(tensors, optimizer, range(3))
    before = optimizer.store.read_array("p")
    with torch.no_grad():
        tensors[0][7] = 42.0
    optimizer.accept_parameters()
    after = optimizer.store.read_array("p")
    assert np.flatnonzero(before != after).tolist() == [7] and after[7] == 42.0
    assert (before != torch.from_numpy(before).bfloat16().float().numpy()).any()
    optimizer.rollback()
    assert optimizer.steps == 3 and np.array_equal(optimizer.store.read_array("p"), before)


def test_accepting_that_fails_changes_nothing(open_optimizer, monkeypatch):
    tensors = model()
    optimizer = open_optimizer(tensors)
    run(tensors, optimizer, range(2))
    with torch.no_grad():
        tensors[2].mul_(2.0)

    def failing(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(StorageFullError):
            optimizer.accept_parameters()
    assert optimizer.steps == 2
    with pytest.raises(StateError, match="must be changed by this optimizer only"):
        run(tensors, optimizer, [2])
    optimizer.accept_parameters()
    run(tensors, optimizer, [2])
    assert optimizer.steps == 3


# Older steps


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_an_older_snapshot_into_an_open_optimizer(open_optimizer, tmp_path, overlap):
    """To the bit: the weights, the state, metadata, and what follows; a handle of that step loads after it."""
    tensors = model()
    optimizer = open_optimizer(tensors, overlap=overlap, resident_bytes=1 << 20, **OPTIONS)
    optimizer.metadata["cursor"] = (1, 2)
    run(tensors, optimizer, range(2))
    optimizer.store.snapshot(tmp_path / "two")
    handle = optimizer.state_dict()
    run(tensors, optimizer, range(2, 5))
    wanted = [tensor.detach().clone() for tensor in tensors]
    optimizer.metadata["cursor"] = None
    optimizer.param_groups[0]["lr"] = 3.0
    with pytest.raises(StateError, match="`restore` a snapshot of that step first"):
        optimizer.load_state_dict(handle)
    for _ in range(2):
        backward(tensors, 9)  # an update that backward has begun is discarded
        assert optimizer.restore(tmp_path / "two") == 2
        assert optimizer.metadata == {"cursor": (1, 2)} and optimizer.store.tensor_steps == (2,) * 5
        optimizer.load_state_dict(handle)
        run(tensors, optimizer, range(2, 5))
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "two"]


def test_a_snapshot_of_another_run_layout_and_number_of_files(open_optimizer, tmp_path):
    ours, other = model(), model(seed=5)
    theirs = open_optimizer(other, path=[tmp_path / "a", tmp_path / "b"], device=["host", "host"], extent_params=2048)
    run(other, theirs, range(3))
    theirs.store.snapshot(tmp_path / "copy")
    optimizer = open_optimizer(ours)
    run(ours, optimizer, range(1))
    assert optimizer.restore(tmp_path / "copy") == 3
    for tensors, each in ((ours, optimizer), (other, theirs)):
        run(tensors, each, [3])
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def test_snapshots_that_do_not_fit_change_nothing(open_optimizer, tmp_path):
    tensors = model()
    optimizer = open_optimizer(tensors)
    run(tensors, optimizer, range(2))
    others = {
        "tensors": (model()[:4], {}),
        "fewer": (model()[1:], {}),
        "arrays": (model(), {"state_format": "bf16"}),
        "profile": (model(), {"profile": "deepspeed"}),
    }
    for name, (each, options) in others.items():
        open_optimizer(each, path=tmp_path / name, **options).store.snapshot(tmp_path / f"{name} copy")
    open_optimizer([torch.nn.Parameter(torch.ones(3))], path=tmp_path / "one").store.snapshot(tmp_path / "one copy")
    (tmp_path / "empty").mkdir()
    content = optimizer.store.path.read_bytes()
    for name in (*[f"{name} copy" for name in (*others, "one")], "empty", "missing", "a\0b"):
        with pytest.raises(StateError):
            optimizer.restore(tmp_path / name)
        assert optimizer.store.path.read_bytes() == content and optimizer.steps == 2
    with pytest.raises(StateError, match="in use"):
        optimizer.restore(optimizer.store.path)
    run(tensors, optimizer, [2])
    assert optimizer.steps == 3


# Files


def test_a_relative_path_is_that_of_construction(tmp_path, monkeypatch):
    """Scripts change their folder after it (Hydra)."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tensors = model()
    optimizer = NearStorageAdamW(tensors, path="state", extent_params=1024)
    monkeypatch.chdir(tmp_path / "there")
    with torch.no_grad():
        tensors[0].zero_()  # so that the state begins again
    run(tensors, optimizer, range(2))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    optimizer.store.snapshot("copy")
    optimizer.restore("copy")
    optimizer.close()
    assert sorted(tmp_path.glob("*/*")) == [tmp_path / "here" / "state", tmp_path / "there" / "copy"]
    with StateStore.open(tmp_path / "here" / "state") as store:
        assert store.steps == 2


@pytest.mark.full
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_dropped_optimizer_gives_its_file_back(tmp_path, overlap):
    """With an update begun by backward its threads, and the file's lock, stayed for the process's life."""
    tensors = model()
    optimizer = NearStorageAdamW(tensors, path=tmp_path / "state", overlap=overlap, extent_params=1024)
    run(tensors, optimizer, range(2))
    optimizer.zero_grad()
    backward(tensors[:2], 2)  # the others are waited for
    del optimizer
    deadline = time.monotonic() + 30
    while True:
        gc.collect()  # what the hooks have left to do refers to it for a while
        try:
            again = NearStorageAdamW(tensors, path=tmp_path / "state", resume=True)
            break
        except StateError:
            assert time.monotonic() < deadline, "the file is still in use"
            time.sleep(0.05)
    assert again.steps == 2
    again.close()


# Interrupts


def test_an_interrupt_at_any_line_of_the_handle_is_no_edit(tmp_path):
    """It left `state` cleared and its copy not, and the next step took that for an edit."""
    tensors = model()
    optimizer = NearStorageAdamW(tensors, path=tmp_path / "state", **OPTIONS)
    run(tensors, optimizer, [1])
    refresh = type(optimizer)._refresh_handle.__code__
    lines = sorted({line for _, _, line in refresh.co_lines() if line and line > refresh.co_firstlineno})

    def interrupt_at(wanted):
        def trace(frame, event, _):
            if frame.f_code is not refresh:
                return None
            if event == "line" and frame.f_lineno == wanted:
                raise KeyboardInterrupt
            return trace

        return trace

    for number, line in enumerate(lines):
        backward(tensors, number)
        earlier = sys.gettrace()
        sys.settrace(interrupt_at(line))
        try:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        finally:
            sys.settrace(earlier)
        assert optimizer.steps == 2 * number + 2
        run(tensors, optimizer, [number])
        assert optimizer.state_dict()["state"][0]["step"] == optimizer.steps == 2 * number + 3
    optimizer.close()
