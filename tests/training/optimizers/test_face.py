"""What an optimizer shows beside torch's own members: `report`, `store`, a norm hook, and few others."""

import inspect

import pytest
import torch

from nearflash.abi.optimizers import Profile
from nearflash.storage import StateStore
from nearflash.training import NearStorageAdamW, NearStorageOptimizer, Report


def test_few_members_beside_torch():
    own = {name for name, _ in inspect.getmembers(NearStorageAdamW) if not name.startswith("_")}
    assert own - set(dir(torch.optim.Optimizer)) == {
        "accept_parameters", "accumulating", "acquire", "close", "delta", "full_state_dict", "load_full_state_dict",
        "loss_scale", "metadata", "release", "report", "restore", "rollback", "rule", "scale_loss", "steps", "store",
    }  # fmt: skip


def test_report(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    assert isinstance(optimizer.report, Report)
    assert (optimizer.report.grad_norm, optimizer.report.timings) == (None, {})
    set_gradients(tensors, 0)
    optimizer.step()
    report = optimizer.report
    assert report.grad_norm == pytest.approx(float(torch.cat([t.grad.reshape(-1) for t in tensors]).norm()), rel=1e-5)
    assert (report.skipped_steps, report.mispredictions, report.traffic.steps) == (0, 0, 1)
    assert {"step", "norm", "update", "commit"} <= set(report.timings) and report.stalls.step_s > 0
    assert report.timings == report.timeline.seconds


def test_store(tensors, set_gradients, open_optimizer, tmp_path):
    optimizer = open_optimizer(tensors)
    set_gradients(tensors, 0, without=(2,))
    optimizer.step()
    store = optimizer.store
    assert store.path == tmp_path / "state" and store.paths == (store.path,) and store.profile is Profile.IEEE
    assert store.tensor_steps == (1, 1, 0, 1, 1) and store.verify() == []
    status = store.status()
    assert (status.step, status.identity, status.updates) == (1, store.identity, (0, 1))
    assert (status.tensors, status.params) == (5, sum(t.numel() for t in tensors))
    assert next(status.lines()) == f"step 1 of state {store.identity}, profile ieee"
    (copy,) = store.snapshot(tmp_path / "snapshot")
    assert store.export(tmp_path / "x.safetensors") == (tmp_path / "x.safetensors").stat().st_size
    with StateStore.open(copy) as copied:
        assert (copied.read_array("m") == store.read_array("m")).all()


def test_store_follows_a_group_that_was_added(tensors, open_optimizer):
    optimizer = open_optimizer(tensors[:2])
    store = optimizer.store
    optimizer.add_param_group({"params": tensors[2:]})
    assert store is optimizer.store and len(store.manifest.tensors) == 5


def test_norm_hook(tensors, set_gradients, open_optimizer, tmp_path):
    """The hook sees this optimizer's gradients; what it returns is what clipping counts with."""
    seen = []

    def with_others(gradients):
        seen.append(list(gradients))
        return sum(float(gradient.double().square().sum()) for gradient in seen[-1]) + 1e6

    optimizer = open_optimizer(tensors, sum_of_squares=with_others, max_grad_norm=1.0)
    set_gradients(tensors, 0, without=(1,))
    optimizer.step()
    assert len(seen) == 1 and len(seen[0]) == 4 and all(isinstance(gradient, torch.Tensor) for gradient in seen[0])
    assert optimizer.report.grad_norm > 1000


def test_a_subclass_shows_the_options_too():
    class Other(NearStorageOptimizer):
        """Another rule."""

        def __init__(self, params, lr=1e-3, **options):
            super().__init__(params, {"lr": lr, "weight_decay": 0.0}, **options)

    assert "max_grad_norm" in inspect.signature(Other).parameters and "max_grad_norm:" in Other.__doc__
