"""Bad input, damage, faults, kills: the last committed step stays, to the bit, and training goes on from it."""

import copy
import errno
import gc
import os
import pickle
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from nearflash.abi.errors import (
    CommandError,
    DeviceError,
    FormatError,
    LostStepWarning,
    NonFiniteError,
    ShapeError,
    StateError,
    StorageFullError,
)
from nearflash.device import open_device
from nearflash.device.memory import DEFAULT_BYTES
from nearflash.training import NearStorageAdamW, NearStorageSGD
from nearflash.training.integrations.checkpoints import restore
from nearflash.verify.fixtures.forked import ForkedProgram


@pytest.fixture
def trained(tensors, set_gradients, open_optimizer):
    """An optimizer after two steps, with gradients for the third, and a check that nothing has changed since."""
    optimizer = open_optimizer(tensors)
    for step in range(2):
        set_gradients(tensors, step)
        optimizer.step()
    set_gradients(tensors, 2)
    values = [t.detach().clone() for t in tensors]
    content = optimizer.store.path.read_bytes()

    def unchanged(file=True):
        assert optimizer.steps == 2
        assert all(torch.equal(a, b) for a, b in zip(values, tensors, strict=True))
        assert not file or optimizer.store.path.read_bytes() == content

    return optimizer, unchanged


def expect_same_future(optimizer, tensors, set_gradients, tmp_path):
    """A third step now gives what it gives without any trouble before."""
    set_gradients(tensors, 2)
    optimizer.step()
    generator = torch.Generator().manual_seed(3)
    fresh = [torch.nn.Parameter(torch.randn(t.shape, generator=generator)) for t in tensors]
    with NearStorageAdamW(fresh, path=tmp_path / "undisturbed") as other:
        for step in range(3):
            set_gradients(fresh, step)
            other.step()
    assert all(torch.equal(a, b) for a, b in zip(fresh, tensors, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_gradient(trained, tensors, set_gradients, tmp_path, value):
    optimizer, unchanged = trained
    tensors[4].grad[1, 2, 3] = value
    tensors[2].grad[:2] = value
    with pytest.raises(NonFiniteError, match=r"gradient of '0.2' must be finite.* in 2 elements \(3 in 2 tensors\)"):
        optimizer.step()
    unchanged()
    expect_same_future(optimizer, tensors, set_gradients, tmp_path)


def test_gradients_and_tensors_of_another_kind(trained, tensors):
    optimizer, unchanged = trained
    head, good = tensors[4], tensors[4].grad
    head.grad = good.to_sparse()
    with pytest.raises(FormatError, match=r"gradient of '0.4' must be dense and floating point, not torch.sparse_coo"):
        optimizer.step()
    head.grad, data = good, head.data
    head.data = data.double()
    with pytest.raises(FormatError, match=r"parameter '0.4' must be float32, not float64"):
        optimizer.step()
    head.data = data.reshape(55, 7)
    with pytest.raises(ShapeError, match=r"parameter '0.4' must have the shape \(5, 7, 11\), not \(55, 7\)"):
        optimizer.step()
    head.data = data
    unchanged()


@pytest.mark.parametrize("array", [0, 1, 2])
def test_flipped_bit_is_never_trained_on(trained, array):
    optimizer, unchanged = trained
    layout = optimizer._optimizer_state.store._files[0].layout
    content = bytearray(optimizer.store.path.read_bytes())
    content[layout.array_offset(0, "pmv"[array], layout.extents[1])] ^= 1
    optimizer.store.path.write_bytes(content)
    with pytest.raises(StateError, match=f"array {'pmv'[array]} of step 2 is damaged in tensors '0.0' .parameters"):
        optimizer.step()
    unchanged(file=False)
    assert len(optimizer.store.verify()) == 1


@pytest.mark.parametrize("number, expected", [(errno.ENOSPC, StorageFullError), (errno.EIO, StateError)])
def test_failing_write(trained, tensors, set_gradients, tmp_path, monkeypatch, number, expected):
    optimizer, unchanged = trained
    real, left = os.pwritev, [4]

    def failing(fd, views, offset):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return real(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(expected, match=r"offset \d+"):
            optimizer.step()
    unchanged(file=False)
    expect_same_future(optimizer, tensors, set_gradients, tmp_path)


def test_device_fault(tensors, set_gradients, open_optimizer, tmp_path):
    with open_device("model:update-tiny") as device:
        optimizer = open_optimizer(tensors, device=device)
        for step in range(2):
            set_gradients(tensors, step)
            optimizer.step()
        values, real, calls = [t.detach().clone() for t in tensors], device._finish, []

        def faulty(timeout_s):
            calls.append(timeout_s)
            if len(calls) == 2:
                raise DeviceError("status WRITE_ERROR at address 0x1000")
            return real(timeout_s)

        device._finish = faulty
        with pytest.raises(DeviceError, match="WRITE_ERROR"):
            optimizer.step()
        assert optimizer.steps == 2 and len(calls) == 2
        assert all(torch.equal(a, b) for a, b in zip(values, tensors, strict=True))
        device._finish = real
        expect_same_future(optimizer, tensors, set_gradients, tmp_path)
        optimizer.close()


def test_changes_from_outside(trained, tensors, set_gradients, make_reference, open_optimizer, tmp_path):
    """Before the first step the tensors count (a checkpoint loaded late); after it such a change is an error."""
    optimizer, _ = trained
    with torch.no_grad():
        tensors[2].mul_(2)
    with pytest.raises(StateError, match=r"parameter '0.2' must be changed by this optimizer only"):
        optimizer.step()
    fresh = open_optimizer(tensors, path=tmp_path / "fresh", weight_decay=0.0)
    with torch.no_grad():
        tensors[2].fill_(7.0)
    reference = make_reference(tensors)
    fresh.step()
    reference.step(tensors, lambda i: {"lr": 1e-3})
    assert np.array_equal(tensors[2].detach().numpy(), reference.p[2])


def mul(tensor):
    tensor.data.mul_(2)


def clamp_one_element(tensor):
    tensor.data.view(-1)[-1].clamp_(9, 9)


def replace(tensor):
    tensor.data = torch.full_like(tensor, 7.0)


def through_numpy(tensor):
    tensor.detach().numpy().reshape(-1)[0] += 1


def from_a_vector(tensor):
    torch.nn.utils.vector_to_parameters(torch.arange(float(tensor.numel())), [tensor])


def initialise(tensor):
    tensor.data.normal_(generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("change", [mul, clamp_one_element, replace, through_numpy, from_a_vector, initialise])
def test_changes_that_torch_does_not_count(
    tensors, set_gradients, make_reference, open_optimizer, tmp_path, change, overlap
):
    """They had been undone in silence: before the first step they count, after it they are an error."""
    optimizer = open_optimizer(tensors, weight_decay=0.0, overlap=overlap)
    set_gradients(tensors, 1)
    change(tensors[0])
    reference = make_reference(tensors)
    optimizer.step()
    reference.step(tensors, lambda i: {"lr": 1e-3})
    assert all(np.array_equal(t.detach().numpy().reshape(-1), p) for t, p in zip(tensors, reference.p, strict=True))
    published = [t.detach().clone() for t in tensors]
    change(tensors[0])
    changed = [t.detach().clone() for t in tensors]
    with pytest.raises(StateError, match=r"parameter '0.0' must be changed by this optimizer only"):
        optimizer.step()
    assert optimizer.steps == 1 and all(torch.equal(a, b) for a, b in zip(changed, tensors, strict=True))
    tensors[0].data.copy_(published[0])
    optimizer.step()
    assert optimizer.steps == 2, "as they were published, they are no change"


# Files


@pytest.mark.parametrize("noticed", ["before", "after"])
def test_no_room_to_begin_again(tensors, set_gradients, open_optimizer, monkeypatch, noticed):
    """A group is added and the disk is full: the next step waited for ever, with the old file gone."""
    optimizer = open_optimizer(tensors[:2])
    file = optimizer.store.path.read_bytes()
    if noticed == "before":
        monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=-(10**9)))
    else:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError):
        optimizer.add_param_group({"params": tensors[4:]})
    assert len(optimizer.param_groups) == 1
    set_gradients(tensors, 0)
    if noticed == "before":
        assert optimizer.store.path.read_bytes() == file
        optimizer.step()
    else:
        with pytest.raises(StateError, match="must be open"):
            optimizer.step()


def test_restore_onto_a_running_optimizer(trained, tmp_path):
    """It had replaced the file under it."""
    optimizer, unchanged = trained
    optimizer.store.snapshot(tmp_path / "checkpoint" / "nearflash")
    with pytest.raises(StateError, match="in use"):
        restore(tmp_path / "checkpoint", optimizer.store.path)
    unchanged()


def test_an_exact_resume_rejects_a_lost_step(trained, tensors, open_optimizer):
    optimizer, _ = trained
    optimizer.close()
    path = optimizer.store.paths[0]
    with path.open("r+b") as file:  # step 2 lies in the first block
        file.seek(100)
        file.write(b"!")
    with pytest.raises(StateError, match=r'resume="exact" must find the newest step: .* is at step 1'):
        open_optimizer(tensors, path=path, resume="exact")
    with pytest.warns(LostStepWarning), open_optimizer(tensors, path=path, resume=True) as resumed:
        assert resumed.steps == 1
    with pytest.raises(CommandError, match="resume must be True"):
        open_optimizer(tensors, path=path, resume="yes")


def test_copies_of_an_optimizer_are_rejected(trained):
    """They had no state, and trained from nothing."""
    optimizer, unchanged = trained
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="must not be copied or pickled"):
            call(optimizer)
    with pytest.raises(StateError, match="state_dict must have state and param_groups"):
        optimizer.load_state_dict({})
    unchanged()


def test_momentum_that_was_not_stored(tensors, set_gradients, tmp_path):
    with NearStorageSGD(tensors, path=tmp_path / "state", lr=0.1) as optimizer:
        set_gradients(tensors, 0)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(CommandError, match="momentum_buffer must be stored from construction on"):
            optimizer.step()
        assert optimizer.steps == 1


def test_lazy_negatives_and_another_default_device(trained, tensors, open_optimizer, tmp_path):
    optimizer, _ = trained
    tensors[0].grad = torch._neg_view(torch.ones(70, 30))
    optimizer.step()
    assert optimizer.steps == 3
    torch.set_default_device("meta")
    try:
        other = open_optimizer(tensors, path=tmp_path / "other")
        other.step()
    finally:
        torch.set_default_device("cpu")
    assert other.steps == 1


def test_a_closed_optimizer_gives_device_memory_back(tensors, set_gradients, open_optimizer, tmp_path):
    """It stayed mapped until the interpreter collected circles, 4 GiB a device."""

    def mapped_bytes():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")

    gc.disable()
    try:
        optimizer = open_optimizer(tensors, path=tmp_path / "state")
        for step in range(2):
            set_gradients(tensors, step)
            optimizer.step()
        opened = mapped_bytes()
        optimizer.close()
        assert mapped_bytes() < opened - DEFAULT_BYTES // 2
    finally:
        gc.enable()


def test_places_that_cannot_be(trained, tensors, open_optimizer, tmp_path):
    optimizer, _ = trained
    with pytest.raises(StateError, match=r"cannot be a state file .File name too long"):
        open_optimizer(tensors, path=tmp_path / ("x" * 300))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match="cannot be a folder"):
            optimizer.store.snapshot(folder)


def test_full_disk_at_creation(tensors, open_optimizer, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match="no room while reserving"):
        open_optimizer(tensors)
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit(tmp_path):
    """A limit of the process (ulimit -f) is named as a full disk is."""
    code = (
        "import resource, torch; from nearflash.training import NearStorageAdamW\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"NearStorageAdamW([torch.nn.Parameter(torch.ones(9000))], path={str(tmp_path / 'state')!r})"
    )
    program = ForkedProgram(code)
    _, errors = program.communicate()
    assert program.returncode == 1 and "StorageFullError: no room while reserving" in errors
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_refused_with_both_choices(trained, tensors, open_optimizer):
    _, unchanged = trained
    with pytest.raises(StateError, match="must not exist yet: pass resume=True to resume from it, or give another"):
        open_optimizer(tensors)
    unchanged()


def test_locked_file(trained, tensors, open_optimizer):
    _, unchanged = trained
    with pytest.raises(StateError, match="in use by another process"):
        open_optimizer(tensors, resume=True)
    unchanged()


@pytest.mark.parametrize("resume", [True, "auto"])
@pytest.mark.parametrize("profile", ["ieee", "deepspeed"])
def test_resume_is_exact(tensors, set_gradients, open_optimizer, tmp_path, resume, profile):
    """Closed and opened at every step, on two devices in turn: the same bits as without."""
    other = [torch.nn.Parameter(t.detach().clone()) for t in tensors]
    whole = open_optimizer(other, path=tmp_path / "whole", profile=profile)
    for step in range(4):
        device = ("host:update-smartssd", "model:update-tiny")[step % 2]
        optimizer = open_optimizer(tensors, resume=resume if step else False, device=device, profile=profile)
        assert optimizer.steps == step
        for parameters, each in ((tensors, optimizer), (other, whole)):
            set_gradients(parameters, step)
            each.step()
        optimizer.close()
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
    open_optimizer(tensors, resume=resume, profile=profile)
    assert all(torch.equal(a, b) for a, b in zip(tensors, other, strict=True))


def test_resume_with_other_parameters_or_profile(trained, tensors, open_optimizer):
    optimizer, _ = trained
    optimizer.close()
    content = optimizer.store.path.read_bytes()
    renamed = [(f"layer{i}", t) for i, t in enumerate(tensors)]
    reshaped = [*tensors[:2], torch.nn.Parameter(torch.ones(31)), *tensors[3:]]
    for parameters, options, message in [
        (tensors, {"profile": "deepspeed"}, "profile must be 'ieee' as in .*state, not 'deepspeed'"),
        (tensors[:4], {}, "parameters must be those of .*state: 5 tensors, not 4"),
        (renamed, {}, r"tensor '0.0' \(float32, \(70, 30\)\), not 'layer0'"),
        (reshaped, {}, r"tensor '0.2' \(float32, \(30,\)\), not '0.2' \(float32, \(31,\)\)"),
    ]:
        with pytest.raises(StateError, match=message):
            open_optimizer(parameters, resume=True, **options)
    assert optimizer.store.path.read_bytes() == content


@pytest.mark.parametrize("length", [100, -4096, -1, 0])
def test_short_or_misaligned_file(trained, tensors, open_optimizer, length):
    optimizer, _ = trained
    optimizer.close()
    content = optimizer.store.path.read_bytes()[:length]
    optimizer.store.path.write_bytes(content)
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(StateError, match=r"must (be a whole number of|have)"):
        open_optimizer(tensors, resume=True)
    assert optimizer.store.path.read_bytes() == content
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


# Kills

CHILD = """
import sys, torch
from nearflash.training import NearStorageAdamW
path, last = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
tensors = [torch.nn.Parameter(torch.randn(n)) for n in (90_000, 33, 70_001)]
with NearStorageAdamW(tensors, path=path, resume="auto", extent_params=65536) as optimizer:
    print("at", optimizer.steps, flush=True)
    while optimizer.steps < last:
        torch.manual_seed(1 + optimizer.steps)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape)
        optimizer.step()
        print("at", optimizer.steps, flush=True)
"""


def start_child(path, last):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(last)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def killed_child(path, announcements, delay_s):
    """Steps that a child announced, up to the kill: `delay_s` after the last of so many announcements."""
    with start_child(path, 10**6) as child:
        seen = [int(child.stdout.readline().split()[1]) for _ in range(announcements)]
        time.sleep(delay_s)
        child.kill()
        seen += [int(line.split()[1]) for line in child.stdout if line.endswith("\n")]
    return seen


def kill_campaign(tmp_path, kills, seed):
    """State files `killed` and `whole`, at the same step."""
    rng, announced = np.random.default_rng(seed), 0
    for _ in range(kills):
        seen = killed_child(tmp_path / "killed", int(rng.integers(2, 6)), float(rng.uniform(0, 0.02)))
        assert seen[0] in (announced, announced + 1), "resumed at the last committed step, or the one being committed"
        announced = seen[-1]
    with (
        start_child(tmp_path / "whole", announced + 2) as whole,
        start_child(tmp_path / "killed", announced + 2) as resumed,
    ):
        for child in (whole, resumed):
            _, error = child.communicate(timeout=600)
            assert child.returncode == 0, error


@pytest.mark.full
def test_killed_and_resumed_is_bit_identical(tmp_path, read_state):
    kill_campaign(tmp_path, kills=1, seed=21)
    assert_equal_states(read_state, tmp_path)


@pytest.mark.full
def test_killed_many_times(tmp_path, read_state):
    kill_campaign(tmp_path, kills=40, seed=22)
    assert_equal_states(read_state, tmp_path)


def assert_equal_states(read_state, tmp_path):
    (step, killed), (other_step, whole) = read_state(tmp_path / "killed"), read_state(tmp_path / "whole")
    assert step == other_step
    for array in ("p", "m", "v"):
        for one, other in zip(killed[array], whole[array], strict=True):
            assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
