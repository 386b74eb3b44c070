"""master="split" of a model with bf16 weights and fp32 norms, as many checkpoints have them."""

import numpy as np
import pytest
import torch

from nearflash.storage.state.master import round_master
from nearflash.training import NearStorageAdamW, TopK
from nearflash.training.blocks import stream_blocks

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "extent_params": 1024, "direct": False}


def make_mixed():
    """Tensors of both kinds, in several extents and in one with others."""
    torch.manual_seed(3)
    norms = torch.nn.LayerNorm(3000), torch.nn.LayerNorm(24)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 96).bfloat16(), norms[0], torch.nn.Linear(96, 24).bfloat16(), norms[1]
    )


def open_two(tmp_path, models, **options):
    """A split master and a whole one."""
    return [open_one(tmp_path / master, model, master=master, **options)
            for master, model in zip(("split", "fp32"), models, strict=True)]  # fmt: skip


def open_one(path, model, **options):
    return NearStorageAdamW(model.named_parameters(), path=path, **OPTIONS | options)


def masters(optimizer):
    p, manifest = optimizer.store.read_array("p").view(np.uint32), optimizer.store.manifest
    return [p[entry.start : entry.start + entry.params] for entry in manifest.tensors]


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def words(tensor):
    one, other = (torch.int16, np.uint16) if tensor.dtype is torch.bfloat16 else (torch.int32, np.uint32)
    return tensor.detach().view(one).numpy().view(other).reshape(-1)


def train(models, optimizers, steps=1):
    """By random gradients, the same; masters and tensors then are those of the fp32 master."""
    for _ in range(steps):
        torch.manual_seed(optimizers[0].steps)
        for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
            mine.grad, theirs.grad = (torch.randn_like(mine) for _ in range(2))
            theirs.grad.copy_(mine.grad)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*map(masters, optimizers))
        expected = [round_master(p.view(np.float32)) if tensor.dtype is torch.bfloat16 else p
                    for p, tensor in zip(masters(optimizers[1]), models[0].parameters(), strict=True)]  # fmt: skip
        assert_same(map(words, models[0].parameters()), expected)


@pytest.mark.parametrize("options", [{}, {"overlap": "backward", "state_format": "mx8"}, {"delta_bytes": 1 << 20},
                                     {"resident_bytes": 1 << 24, "compression": TopK(0.1)}],
                         ids=["step", "backward", "delta", "resident"])  # fmt: skip
def test_fp32_norms_beside_bf16_weights_have_the_bits_too(tmp_path, options):
    """Resumed, undone, restored from a snapshot, and accepted after a change in the lower half of a norm."""
    models = make_mixed(), make_mixed()
    split, _ = optimizers = open_two(tmp_path, models, **options)
    train(models, optimizers, 3)
    split.store.snapshot(tmp_path / "at-3")
    split.close()
    models = make_mixed(), models[1]
    split = optimizers[0] = open_one(tmp_path / "split", models[0], master="split", resume=True, **options)
    train(models, optimizers, 2)
    for optimizer in optimizers:
        optimizer.rollback()
    train(models, optimizers)
    for optimizer in optimizers:
        optimizer.restore(tmp_path / "at-3")
    train(models, optimizers, 2)
    with torch.no_grad():
        for model in models:
            model[1].weight[5] = 1 + 2**-20
    for optimizer in optimizers:
        optimizer.accept_parameters()
    train(models, optimizers, 2)
    assert split.store.verify() == []
    for optimizer in optimizers:
        optimizer.close()


def test_streamed_blocks_with_fp32_norms_have_the_bits_too(tmp_path):
    models = [torch.nn.Sequential(torch.nn.Sequential(model)) for model in (make_mixed(), make_mixed())]
    optimizers = open_two(tmp_path, models)
    train(models, optimizers, 2)
    stream = stream_blocks(models[0], optimizers[0])
    stream.close()
    train(models, optimizers, 2)
    for optimizer in optimizers:
        optimizer.close()
