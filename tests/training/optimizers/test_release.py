"""`release` and `acquire`: what is given back, what is refused meanwhile, and that training goes on to the bit."""

import subprocess
import sys

import pytest
import torch

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.device import open_device
from nearflash.storage import StateStore
from nearflash.support.process import resident_bytes
from nearflash.training import NearStorageAdamW
from nearflash.training.blocks import stream_blocks
from nearflash.training.gradients.compression import TopK
from nearflash.training.step import optimizer_state

OPENED = """
import sys
from pathlib import Path
from nearflash.storage import StateStore
StateStore.open(Path(sys.argv[1])).close()
"""


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 90), torch.nn.Tanh(), torch.nn.Linear(90, 3))


def open_it(net, path, **options):
    return NearStorageAdamW(net.parameters(), path=path, **({"lr": 1e-2, "extent_params": 1024} | options))


def backward(net, number):
    net(torch.randn(8, 20, generator=torch.Generator().manual_seed(number))).square().mean().backward()


def step(net, optimizer, number):
    optimizer.zero_grad()
    backward(net, number)
    optimizer.step()


def values(net):
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def is_free(path):
    """Whether another process can open the files."""
    return subprocess.run([sys.executable, "-c", OPENED, str(path)], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "backward"},
        {"overlap": "backward", "free_gradients": True, "max_grad_norm": 0.1},
        {"resident_bytes": 1 << 20, "state_format": "mx8"},
        {"compression": TopK(0.1, warmup_steps=0)},
    ],
    ids=["plain", "backward", "scratch", "resident", "top-k"],
)
@pytest.mark.parametrize("parameters", [False, True])
def test_steps_around_a_release_are_those_without(tmp_path, options, parameters):
    nets = [model(), model()]
    paths = tmp_path / "whole", tmp_path / "state"
    with open_it(nets[0], paths[0], **options) as whole, open_it(nets[1], paths[1], **options) as it:
        for number in range(4):
            step(nets[0], whole, number)
            step(nets[1], it, number)
            it.zero_grad()
            it.release(parameters=parameters)
            assert it.steps == number + 1 and (next(nets[1].parameters()).isnan().all() or not parameters)
            it.acquire()
            assert same(values(nets[0]), values(nets[1]))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "whole"]


def test_before_the_first_step(tmp_path):
    net = model()
    before = values(net)
    with open_it(net, tmp_path / "state") as optimizer:
        optimizer.release(parameters=True)
        optimizer.acquire()
        assert same(values(net), before)
        with torch.no_grad():
            net[0].bias.add_(1)
        with pytest.raises(StateError, match="parameters must be what the store has"):
            optimizer.release(parameters=True)
        optimizer.release()
        optimizer.acquire()
        step(net, optimizer, 0)


def test_devices_buffers_and_strides_come_and_go(tmp_path):
    weight = torch.nn.Parameter(torch.randn(40, 2, 3, 5).to(memory_format=torch.channels_last))
    strides = weight.stride()
    device = open_device("host", "update")
    freed = []
    real = device.free
    device.free = lambda buffer: (freed.append(buffer), real(buffer))
    with NearStorageAdamW([weight], path=tmp_path / "state", device=device, overlap="backward") as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        flat = optimizer._optimizer_state.flat
        assert any(copy is not None for copy in flat._next)
        optimizer.release(parameters=True)
        assert len(freed) >= 5 and flat._next == [None] and weight.untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError):  # a load into it meanwhile would be lost
            weight.data.copy_(torch.zeros(40, 2, 3, 5))
        optimizer.acquire()
        assert weight.stride() == strides and not weight.isnan().any()
        optimizer.step()
    device.close()


def test_every_other_call_names_that_it_is_released(tmp_path):
    net = model()
    with open_it(net, tmp_path / "state", delta_bytes=1 << 20, resident_bytes=0) as optimizer:
        step(net, optimizer, 0)
        state, full = optimizer.state_dict(), optimizer.full_state_dict()
        optimizer.store.snapshot(tmp_path / "snapshot")
        optimizer.release()
        calls = {
            "step": optimizer.step,
            "closure": lambda: optimizer.step(lambda: 1.0),
            "state_dict": optimizer.state_dict,
            "load": lambda: optimizer.load_state_dict(state),
            "full": optimizer.full_state_dict,
            "load full": lambda: optimizer.load_full_state_dict(full),
            "group": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
            "accept": optimizer.accept_parameters,
            "restore": lambda: optimizer.restore(tmp_path / "snapshot"),
            "rollback": optimizer.rollback,
            "delta": lambda: optimizer.delta(since=0),
            "scale": lambda: optimizer.scale_loss(torch.ones(())),
            "accumulating": optimizer.accumulating,
            "status": optimizer.store.status,
            "verify": optimizer.store.verify,
            "snapshot": lambda: optimizer.store.snapshot(tmp_path / "snapshot"),
            "array": lambda: optimizer.store.read_array("p"),
            "stream": lambda: stream_blocks(net, optimizer),
            "release": optimizer.release,
        }
        for name, call in calls.items():
            with pytest.raises(StateError, match="must be acquired, not released: call acquire"):
                call()
                pytest.fail(name)
        optimizer.zero_grad()
        assert optimizer.steps == 1 and optimizer.metadata == {} and optimizer.store.path == tmp_path / "state"
        optimizer.acquire()
        with pytest.raises(StateError, match="must be released for acquire"):
            optimizer.acquire()
        step(net, optimizer, 1)
        optimizer.release()
    with pytest.raises(StateError, match="must be open, not closed"):
        optimizer.acquire()
    with open_it(model(), tmp_path / "state", resume=True) as again:
        assert again.steps == 2


def test_the_lock_stays_unless_asked(tmp_path):
    net, path = model(), tmp_path / "state"
    with open_it(net, path) as optimizer:
        step(net, optimizer, 0)
        optimizer.release()
        assert not is_free(path)
        optimizer.acquire()
        optimizer.release(unlock=True, parameters=True)
        assert is_free(path) and optimizer.steps == 1
        with StateStore.open(path):
            with pytest.raises(StateError, match="in use by another process"):
                optimizer.acquire()
        optimizer.acquire()
        step(net, optimizer, 1)
        expected = values(net)
        optimizer.release(unlock=True)
        other = model()
        with open_it(other, path, resume=True) as another:
            assert same(values(other), expected)
            step(other, another, 2)
        for _ in range(2):
            with pytest.raises(StateError, match="must be as it was at step 2, when it was unlocked"):
                optimizer.acquire()


def test_an_acquire_that_fails_leaves_all_released(tmp_path, monkeypatch):
    net = model()
    with open_it(net, tmp_path / "state", overlap="backward", free_gradients=True) as optimizer:
        step(net, optimizer, 0)
        expected = values(net)
        optimizer.release(parameters=True)
        for name, error in (("GradientScratch", StorageFullError), ("Schedule", StateError), ("StateStore", OSError)):
            with monkeypatch.context() as broken:

                def fail(*_, error=error, **__):
                    raise error("pulled")

                if name == "StateStore":
                    broken.setattr(StateStore, "read", fail)
                else:
                    broken.setattr(optimizer_state, name, fail)
                with pytest.raises(error, match="pulled"):
                    optimizer.acquire()
            assert next(net.parameters()).isnan().all()
            with pytest.raises(StateError, match="call acquire"):
                optimizer.step()
        optimizer.acquire()
        assert same(values(net), expected)
        step(net, optimizer, 1)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_in_the_middle_of_accumulation(tmp_path, overlap):
    """`p.grad` is the script's and stays; an update that backward had begun is made again."""
    nets = [model(), model()]
    with open_it(nets[0], tmp_path / "whole") as whole, open_it(nets[1], tmp_path / "state", overlap=overlap) as it:
        for number in range(3):
            for net, optimizer in zip(nets, (whole, it), strict=True):
                optimizer.zero_grad()
                with optimizer.accumulating():
                    backward(net, 2 * number)
                if optimizer is it:
                    it.release()
                    it.acquire()
                backward(net, 2 * number + 1)
                if optimizer is it:
                    it.release(parameters=True)
                    it.acquire()
                optimizer.step()
        assert same(values(nets[0]), values(nets[1]))


def test_gradients_that_only_the_scratch_file_has_are_not_lost(tmp_path):
    net = model()
    with open_it(net, tmp_path / "state", overlap="backward", free_gradients=True) as optimizer:
        backward(net, 0)
        with pytest.raises(StateError, match="must be used before a release: call step, or zero_grad"):
            optimizer.release()
        optimizer.step()
        assert optimizer.steps == 1
        backward(net, 1)
        optimizer.zero_grad()
        optimizer.release()
        optimizer.acquire()
        step(net, optimizer, 2)


def test_in_the_middle_of_a_step(tmp_path):
    net = model()
    with open_it(net, tmp_path / "state") as optimizer:
        backward(net, 0)

        def closure():
            optimizer.release()
            return 1.0

        with pytest.raises(StateError, match="call acquire"):
            optimizer.step(closure)
        optimizer.acquire()
        optimizer.step()
        assert optimizer.steps == 1

    def norm(gradients):
        with pytest.raises(StateError, match="must not be called from within its own call"):
            inside.release()
        return 1.0

    with open_it(net, tmp_path / "inside", sum_of_squares=norm) as inside:
        inside.step()
        assert inside.steps == 1


def test_memory_comes_back(tmp_path):
    """Of 16 MiB in fp32, with as much staging: most of the staging, and with the tensors' own all of both."""
    weight = torch.nn.Parameter(torch.randn(1 << 22))
    with NearStorageAdamW([weight], path=tmp_path / "state", overlap="backward") as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        held = resident_bytes()
        optimizer.release()
        assert held - resident_bytes() > 0.9 * weight.nbytes
        optimizer.acquire()
        held = resident_bytes()
        optimizer.release(parameters=True)
        assert held - resident_bytes() > 0.9 * weight.nbytes
