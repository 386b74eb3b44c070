"""Train a small model with amsgrad.hpp on the HLS simulation device, beside torch's own AMSGrad.

State and gradients lie in device memory; only gradients go down and parameters come up. Run: python train_amsgrad.py
"""

from pathlib import Path

import torch

from nearflash.abi.commands import UpdateCommand
from nearflash.abi.config import update_config
from nearflash.sim.hls.check import load_rule
from nearflash.sim.hls.device import HlsDevice

Amsgrad = load_rule(Path(__file__).with_name("amsgrad.py"))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane, and whether they lie in a ring: (256, 2), (256, 1)."""
    x = 2 * torch.randn(256, 2, generator=generator)
    return x, ((x.norm(dim=1, keepdim=True) - 2).abs() < 0.7).float()


def model() -> torch.nn.Module:
    """A net of 1,185 parameters, the same every time."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh(),
                               torch.nn.Linear(32, 1))  # fmt: skip


def backward(net: torch.nn.Module, generator: torch.Generator) -> float:
    """Gradients of one batch's loss, which is returned."""
    x, y = batch(generator)
    net.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x), y)
    loss.backward()
    return float(loss.detach())


def train_on_device(steps: int, lr: float = 1e-2) -> list[float]:
    """Losses of training with every update computed by the HLS kernel."""
    net, generator = model(), torch.Generator().manual_seed(2)
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    with HlsDevice(update_config("update-tiny"), rules=[Amsgrad]) as device:
        names = ("p", *Amsgrad.ARRAYS)
        buffers = {name: device.allocate(flat.nbytes) for name in ("g", *names)}
        views = {name: buffer.host.view("<f4") for name, buffer in buffers.items()}
        views["p"][:] = flat
        for name in names:
            buffers[name].sync_to_device()
        addresses = {name: buffer.address for name, buffer in buffers.items()}
        outputs = {name: addresses[name] for name in names}
        losses = []
        for step in range(1, steps + 1):
            losses.append(backward(net, generator))
            views["g"][:] = torch.cat([p.grad.ravel() for p in net.parameters()]).numpy()
            buffers["g"].sync_to_device()
            rule = Amsgrad(lr=lr, step=step, weight_decay=0.01)
            device.run(UpdateCommand(rule, flat.size, addresses, outputs))
            buffers["p"].sync_from_device()
            torch.nn.utils.vector_to_parameters(torch.from_numpy(views["p"].copy()), net.parameters())
    return losses


def train_in_torch(steps: int, lr: float = 1e-2) -> list[float]:
    """Losses of the same training by torch.optim.AdamW(amsgrad=True)."""
    net, generator = model(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01, amsgrad=True)
    losses = []
    for _ in range(steps):
        losses.append(backward(net, generator))
        optimizer.step()
    return losses


if __name__ == "__main__":
    for step, (ours, theirs) in enumerate(zip(train_on_device(100), train_in_torch(100), strict=True)):
        if step % 10 == 9:
            print(f"step {step + 1:>3}  loss {ours:.6f}  torch {theirs:.6f}")
