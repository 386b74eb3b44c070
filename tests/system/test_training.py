"""Training through the optimizer: the same file, tensors and bits on every device."""

import numpy as np
import pytest
import torch

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import AdamStep
from nearflash.device import open_device
from nearflash.model.update.lane import optimizer_step
from nearflash.training import NearStorageAdamW

SHAPES = [(30, 50), (7,), (16, 33)]
STEPS = 3


@pytest.mark.parametrize("profile", ["ieee", "torch_fused", "deepspeed"])
def test_three_steps_equal_the_model(device, tmp_path, profile):
    generator = torch.Generator().manual_seed(8)
    tensors = [torch.nn.Parameter(torch.randn(s, generator=generator).to(torch.bfloat16)) for s in SHAPES]
    expected = [[t.detach().float().numpy().ravel()] + [np.zeros(t.numel(), np.float32)] * 2 for t in tensors]
    groups = [{"params": tensors[:1]}, {"params": tensors[1:], "lr": 0.5, "weight_decay": 0.0}]
    options = {"lr": 0.01, "weight_decay": 0.1, "profile": profile, "param_dtype": "bf16", "extent_params": 1024}
    with NearStorageAdamW(groups, path=tmp_path / "state", device=device, **options) as optimizer:
        for step in range(1, STEPS + 1):
            for index, tensor in enumerate(tensors):
                tensor.grad = torch.randn(tensor.shape, generator=generator).to(torch.bfloat16)
                scalars = {"lr": 0.5, "weight_decay": 0.0} if index else {"lr": 0.01, "weight_decay": 0.1}
                adam = AdamStep(step=step, profile=profile, **scalars)
                new = optimizer_step(adam, tensor.grad.float().numpy().ravel(), *expected[index], CopyFormat.BF16)
                expected[index] = [new.p, new.m, new.v]
            optimizer.step()
        for array, name in enumerate("pmv"):
            stored = optimizer.store.read_array(name)
            for entry, values in zip(optimizer.store.manifest.tensors, expected, strict=True):
                words = stored[entry.start : entry.start + entry.params].view(np.uint32)
                assert np.array_equal(words, values[array].view(np.uint32)), (name, entry.name)
        for tensor, (p, _, _) in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.detach().ravel(), torch.from_numpy(p).to(torch.bfloat16))
        software = "bf16" in device.build.gradients  # these take bf16 gradients as they are
        traffic = optimizer.report.traffic
        assert traffic.to_device_bytes == (2 if software else 4) * traffic.params
        # What changes, where the device says it: most of the weights, at these rates, and headers of the runs.
        says = device.build.delta and device.HAS_LINK
        spare = 2 * traffic.params - traffic.from_device_bytes
        assert -STEPS * 6 * 48 <= spare < traffic.params / 2 if says else spare == 0


def _train(device, path, state_format, **more):
    """Bits of the parameters and of p, m, v after some steps, in extents that end inside tiles of the dither."""
    generator = torch.Generator().manual_seed(9)
    tensors = [torch.nn.Parameter(torch.randn(s, generator=generator).to(torch.bfloat16)) for s in (*SHAPES, (9000,))]
    options = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "param_dtype": "bf16",
        "extent_params": 1024,
        "state_format": state_format,
        **more,
    }
    with NearStorageAdamW(tensors, path=path, device=device, **options) as optimizer:
        for _ in range(STEPS):
            for tensor in tensors:
                tensor.grad = torch.randn(tensor.shape, generator=generator).to(torch.bfloat16)
            optimizer.step()
        return [tensor.detach().view(torch.int16).tolist() for tensor in tensors] + [
            np.asarray(optimizer.store.read_array(name)).tobytes() for name in "pmv"
        ]


@pytest.mark.parametrize("state_format", ["bf16", "mx8"])
def test_narrow_state_has_the_bits_of_host(device, tmp_path, state_format):
    if state_format not in device.build.state_formats:
        pytest.skip(f"{device.identity.name} has no state format {state_format}")
    with open_device("host:update-tiny") as host:
        expected = _train(host, tmp_path / "host", state_format)
    assert _train(device, tmp_path / "device", state_format) == expected


@pytest.mark.full
@pytest.mark.parametrize("state_format", ["fp32", "bf16", "mx8"])
def test_a_split_master_in_gateware_has_the_bits_of_an_fp32_one_on_host(tmp_path, state_format):
    """Masters and moments; the tensors are those of a split one on host."""
    with open_device("host:update-tiny") as host, open_device("verilator:update-tiny-split") as gateware:
        whole = _train(host, tmp_path / "whole", state_format)
        expected = _train(host, tmp_path / "split", state_format, master="split")
        found = _train(gateware, tmp_path / "gateware", state_format, master="split")
    assert found == expected and found[-3:] == whole[-3:]
