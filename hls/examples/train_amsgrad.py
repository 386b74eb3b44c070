"""Train a small model with amsgrad.hpp on the HLS simulation device, beside torch's own AMSGrad.

p, m, v and vmax lie in a state file, as with every near-storage optimizer. Run: python train_amsgrad.py
"""

import tempfile
from pathlib import Path

import torch

from nearflash.abi.kernel.config import update_config
from nearflash.sim.hls.check import load_rule
from nearflash.sim.hls.device import HlsDevice
from nearflash.training.optimizers.optimizer import NearStorageOptimizer

Amsgrad = load_rule(Path(__file__).with_name("amsgrad.py"))


class NearStorageAmsgrad(NearStorageOptimizer):
    """AMSGrad as a torch optimizer; options are those of every near-storage optimizer."""

    def __init__(self, params, lr=1e-3, weight_decay=1e-2, **options):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, **options)

    def rule(self, group, step):
        """Scalars of a group's tensors at their step."""
        return Amsgrad(**self._common(group, step))


def model() -> torch.nn.Module:
    """A net of 1,185 parameters, the same every time."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(),
                               torch.nn.Linear(32, 1))  # fmt: skip


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of learning which points of the plane lie in a ring, 256 new points a step."""
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        x = 2 * torch.randn(256, 2, generator=generator)
        y = ((x.norm(dim=1, keepdim=True) - 2).abs() < 0.7).float()
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_on_device(steps: int, folder: Path) -> list[float]:
    """Every update computed by the HLS kernel; the state file lies in `folder`."""
    net = model()
    with HlsDevice(update_config("update-tiny"), rules=[Amsgrad]) as device:
        options = {"path": folder / "state", "device": device, "extent_params": 1024, "direct": False}
        with NearStorageAmsgrad(net.parameters(), lr=1e-2, **options) as optimizer:
            return train(net, optimizer, steps)


def train_in_torch(steps: int) -> list[float]:
    """The same by torch.optim.AdamW(amsgrad=True)."""
    net = model()
    return train(net, torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=1e-2, amsgrad=True), steps)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = zip(train_on_device(100, Path(folder)), train_in_torch(100), strict=True)
        for step, (ours, theirs) in enumerate(losses, 1):
            if step % 10 == 0:
                print(f"step {step:>3}  loss {ours:.6f}  torch {theirs:.6f}")
