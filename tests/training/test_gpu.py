"""Tensors on a GPU: the state and the parameters of the same steps on the CPU, to the bit."""

import numpy as np
import pytest
import torch

from nearflash.training import NearStorageAdamW, TopK

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")

SHAPES = [(70, 30), (), (30,), (5, 7, 11), (300, 257)]


def parameters(device, dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype).to(device)) for s in SHAPES]


@pytest.mark.parametrize(
    ("dtype", "more"),
    [(torch.float32, {}), (torch.bfloat16, {"param_dtype": "bf16"}), (torch.bfloat16, {"master": "split"})],
    ids=["fp32", "bf16", "split"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"compression": TopK(0.1, warmup_steps=0)}, {"resident_bytes": 1 << 30}],
    ids=["plain", "topk", "resident"],
)
def test_steps_are_those_of_the_cpu(tmp_path, dtype, more, options):
    outs, options = [], options | more
    for device in ("cpu", "cuda"):
        values = parameters(device, dtype)
        with NearStorageAdamW(values, lr=1e-2, device="host", path=tmp_path / device, **options) as optimizer:
            generator = torch.Generator().manual_seed(4)
            for _ in range(4):
                for value in values:
                    value.grad = torch.randn(value.shape, generator=generator).to(dtype).to(device)
                optimizer.step()
        outs.append([value.detach().float().cpu().numpy() for value in values])
    for cpu, gpu in zip(*outs, strict=True):
        np.testing.assert_array_equal(gpu, cpu)


@pytest.mark.parametrize("options", [{"overlap": "backward"}, {"max_grad_norm": 1.0}], ids=["backward", "clipped"])
def test_training_on_a_gpu(tmp_path, options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    states, target = torch.randn(64, 32, device="cuda"), torch.randn(64, 8, device="cuda")
    losses = []
    with NearStorageAdamW(model.parameters(), lr=1e-2, device="host", path=tmp_path / "state", **options) as optimizer:
        for _ in range(30):
            loss = (model(states) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
