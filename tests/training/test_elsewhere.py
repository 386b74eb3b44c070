"""Training goes on, to the bit, from a snapshot, from other files, and from an exported state."""

import pytest
import torch

from nearflash.storage import StateStore
from nearflash.storage.state.exchange import export_state, import_state, reshard
from nearflash.training import NearStorageAdamW


def train(paths, steps, resume, **options):
    """The parameters after so many steps of a small model on one device a file."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.Tanh(), torch.nn.Linear(50, 7))
    named, devices = model.named_parameters(), ["host:update-smartssd"] * len(paths)
    with NearStorageAdamW(named, path=paths, device=devices, resume=resume, extent_params=1024, **options) as optimizer:
        while optimizer.steps < steps:
            torch.manual_seed(optimizer.steps)
            optimizer.zero_grad()
            model(torch.randn(5, 70)).square().mean().backward()
            optimizer.step()
    return [tensor.detach().clone() for tensor in model.parameters()]


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "mx8"])
def test_the_same_future_from_everywhere(tmp_path, state_format):
    paths, resharded = [tmp_path / "a", tmp_path / "b"], [tmp_path / f"r{index}" for index in range(3)]
    train(paths, 3, False, state_format=state_format)
    with StateStore.open(paths) as store:
        copies = store.snapshot(tmp_path / "snapshot")
        reshard(store, resharded, stripe_ratio=(2, 1, 1)).close()
        export_state(store, tmp_path / "x.safetensors")
    import_state(tmp_path / "x.safetensors", [tmp_path / "imported"]).close()
    expected = train(paths, 6, True, state_format=state_format)
    for other in (copies[::-1], resharded, [tmp_path / "imported"]):
        found = train(other, 6, True, state_format=state_format)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True)), other
