"""Fifty steps of every optimizer beside torch.optim in double precision, element by element.

Both get the same fp32 gradients. Each step may add 2 ulp of the parameter (one for the decay's factor, which is
rounded) and 1e-6 of what the step moves or could move; nothing is averaged, so a wrong element anywhere shows.
"""

import numpy as np
import pytest
import torch

from nearflash.training import (
    LossScale,
    NearStorageAdagrad,
    NearStorageAdam,
    NearStorageAdamW,
    NearStorageLion,
    NearStorageSGD,
)

STEPS = 50
SHAPES = [(40, 50), (3, 1100), (1,), (), (33,), (7, 11)]


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, in the tensors' own precision."""

    def __init__(self, params, **scalars):
        super().__init__(params, scalars)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                g = -p.grad if group.get("maximize") else p.grad
                direction = torch.sign(beta1 * m + (1 - beta1) * g)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
                m.mul_(beta2).add_((1 - beta2) * g)


ADAM = {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
CASES = {
    "adamw": (NearStorageAdamW, torch.optim.AdamW, ADAM, {"lr": 5e-2, "betas": (0.5, 0.9), "weight_decay": 0.0}),
    "adam": (NearStorageAdam, torch.optim.Adam, ADAM, {"eps": 1e-5, "maximize": True}),
    "sgd": (NearStorageSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-2},
            {"momentum": 0.5, "dampening": 0.3}),
    "sgd-nesterov": (NearStorageSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.8, "nesterov": True},
                     {"weight_decay": 0.1}),
    "sgd-plain": (NearStorageSGD, torch.optim.SGD, {"lr": 1e-2}, {"lr": 3e-2, "maximize": True}),
    "adagrad": (NearStorageAdagrad, torch.optim.Adagrad, {"lr": 5e-2, "lr_decay": 1e-2, "eps": 1e-8},
                {"weight_decay": 0.1}),
    "lion": (NearStorageLion, Lion, {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}, {"lr": 2e-3}),
}  # fmt: skip


def make(dtype):
    generator = torch.Generator().manual_seed(31)
    tensors = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    tensors[4].requires_grad_(False)
    return tensors


def groups(tensors, other):
    return [{"params": tensors[:2]}, {"params": tensors[2:], **other}]


def give_gradients(optimizer, tensors, step):
    """Two backward passes that add up; now and then without a tensor, or with gradients that will be clipped."""
    generator = torch.Generator().manual_seed(100 + step)
    optimizer.zero_grad()
    trained = [t for i, t in enumerate(tensors) if t.requires_grad and (step + i) % 7]
    factors = [[torch.randn(t.shape, generator=generator) * (0.02, 2.0)[step % 3 == 0] for t in trained] for _ in "ab"]
    with optimizer.accumulating():
        (optimizer.loss_scale * sum((t * f).sum() for t, f in zip(trained, factors[0], strict=True))).backward()
    optimizer.scale_loss(sum((t * f).sum() for t, f in zip(trained, factors[1], strict=True))).backward()


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_equals_torch_element_by_element(tmp_path, name, overlap):
    kind, reference_kind, scalars, other = CASES[name]
    mine, theirs = make(torch.float32), make(torch.float64)
    options = {"path": tmp_path / "state", "extent_params": 1024, "max_grad_norm": 5.0, "overlap": overlap}
    bounds = [torch.zeros_like(t) for t in theirs]
    reference = reference_kind(groups(theirs, other), **scalars)
    with kind(groups(mine, other), loss_scale=LossScale(256.0, window=20), **options, **scalars) as optimizer:
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 2 * STEPS) for o in (optimizer, reference)]
        clipped = 0
        for step in range(STEPS):
            give_gradients(optimizer, mine, step)
            for ours, other_tensor in zip(mine, theirs, strict=True):
                other_tensor.grad = None if ours.grad is None else ours.grad.double() / optimizer.loss_scale
            norm = torch.nn.utils.clip_grad_norm_([t for t in theirs if t.grad is not None], 5.0)
            clipped += bool(norm > 5.0)
            before = [t.detach().clone() for t in theirs]
            lr = max(group["lr"] for group in reference.param_groups)
            reference.step()
            optimizer.step()
            assert optimizer.report.grad_norm == pytest.approx(float(norm), rel=1e-6)
            for schedule in schedules:
                schedule.step()
            for ours, exact, old, bound in zip(mine, theirs, before, bounds, strict=True):
                largest = torch.maximum(exact.detach().abs(), old.abs()).float().reshape(-1)
                ulp = torch.from_numpy(np.spacing(largest.numpy())).double().view_as(bound)
                bound += 2 * ulp + 1e-6 * ((exact - old).abs() + lr)
                assert bool(((ours.double() - exact).abs() <= bound).all()), f"step {step}"
        assert 0 < clipped < STEPS and optimizer.loss_scale == 1024.0
        assert torch.equal(mine[4], make(torch.float32)[4]), "a frozen tensor stays as it is"
        assert optimizer.steps == STEPS
        assert (optimizer.report.mispredictions > 0) == (overlap == "backward")
