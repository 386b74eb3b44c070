"""Training with Top-K gradients: all of them change nothing; what is left out survives failures and mispredictions."""

from functools import partial

import numpy as np
import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.training import LossScale, TopK

top_k = partial(TopK, warmup_steps=0)


def bits(optimizer):
    return np.concatenate([optimizer.store.read_array(array).view(np.uint32) for array in "pmv"])


def copies(tensors):
    return [torch.nn.Parameter(t.detach().clone()) for t in tensors]


def backward(optimizer, tensors, step):
    generator = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    loss = sum((t * torch.randn(t.shape, generator=generator)).sum() for t in tensors)
    optimizer.scale_loss(loss).backward()


def test_all_of_them_is_as_without(tensors, open_optimizer, tmp_path):
    found = []
    for name, compression in (("dense", None), ("whole", top_k(1.0, value_format="fp32"))):
        mine = copies(tensors)
        optimizer = open_optimizer(mine, path=tmp_path / name, compression=compression, max_grad_norm=3.0)
        for step in range(3):
            backward(optimizer, mine, step)
            optimizer.step()
        found.append(bits(optimizer))
    assert np.array_equal(*found)


@pytest.mark.parametrize(("saved", "left_out"), [(True, 3 / 4), (False, 0)])
def test_few_of_them_need_few_bytes(open_optimizer, saved, left_out):
    """And what is left out, where it is saved: 5/8, in whole blocks."""
    tensor = torch.nn.Parameter(torch.zeros(64 * 1024))
    optimizer = open_optimizer([tensor], extent_params=16 * 1024, compression=top_k(0.01, saved=saved))
    tensor.grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    down = optimizer.report.traffic.to_device_bytes / optimizer.report.traffic.params
    assert 0.04 < down - left_out < 0.06, "bytes a parameter: 1 % of 4, and headers"
    assert int((tensor != 0).sum()) == 4 * round(0.01 * 16 * 1024)


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("residual", ["fp32", "int4"])
def test_the_residual_is_that_of_committed_steps(tensors, open_optimizer, tmp_path, overlap, residual):
    """Failures, skips, mispredictions and more devices between: the same bits as an undisturbed run."""
    settings = top_k(0.05, residual=residual)
    plain, mine = copies(tensors), copies(tensors)
    undisturbed = open_optimizer(plain, path=tmp_path / "undisturbed", compression=settings, loss_scale=16.0)
    optimizer = open_optimizer(
        mine,
        path=[tmp_path / "a", tmp_path / "b"],
        device=["host:update-smartssd"] * 2,
        compression=settings,
        loss_scale=LossScale(16.0, window=0),
        overlap=overlap,
    )
    store = optimizer._optimizer_state.store
    for step in range(6):
        backward(undisturbed, plain, step)
        undisturbed.step()
        if step == 2:
            backward(optimizer, mine, 77)
            mine[0].grad[0, 0] = float("inf")
            optimizer.step()
        backward(optimizer, mine, step)
        if step == 3:
            real, store.commit = store.commit, lambda *_: (_ for _ in ()).throw(StateError("a flush failed"))
            with pytest.raises(StateError, match="a flush failed"):
                optimizer.step()
            store.commit = real
        if step == 4:
            mine[4].grad.mul_(1.0)  # counts as a change
        optimizer.step()
    assert optimizer.report.skipped_steps == 1 and optimizer.steps == 6
    assert np.array_equal(bits(undisturbed), bits(optimizer))


@pytest.mark.parametrize("residual", ["fp32", "int4"])
def test_what_was_left_out_is_resumed_rolled_back_and_carried(tensors, open_optimizer, tmp_path, residual):
    """Closed and opened, undone and done again: the same bits; also of tensors that a step leaves out."""
    settings = top_k(0.05, residual=residual)
    plain, mine = copies(tensors), copies(tensors)
    undisturbed = open_optimizer(plain, path=tmp_path / "undisturbed", compression=settings)
    for step in range(5):
        backward(undisturbed, plain, step)
        plain[0].grad = None if step == 2 else plain[0].grad
        undisturbed.step()
    for step in range(5):
        optimizer = open_optimizer(mine, compression=settings, resume="auto", resident_bytes=1 << 20)
        for seed in (99, step):
            backward(optimizer, mine, seed)
            mine[0].grad = None if step == 2 else mine[0].grad
            optimizer.step()
            if seed == 99:
                optimizer.rollback()
        held = {name: values.copy() for name, values in optimizer._optimizer_state._compressor.arrays().items()}
        optimizer.close()
    assert all(values.any() for values in held.values())
    for name, values in undisturbed._optimizer_state._compressor.arrays().items():
        assert np.array_equal(values, held[name])
    optimizer = open_optimizer(mine, compression=settings, resume=True)
    assert np.array_equal(bits(undisturbed), bits(optimizer))
    optimizer.load_full_state_dict(undisturbed.full_state_dict())
    assert not any(values.any() for values in optimizer._optimizer_state._compressor.arrays().values())
    optimizer.close()
    with pytest.raises(StateError, match=r"parameters must be those of .*: [45] arrays, not 3"):
        open_optimizer(mine, resume=True)


def test_what_is_not_saved_begins_at_zero_after_a_resume_or_a_rollback(open_optimizer, tmp_path):
    """A constant gradient: the second step keeps other elements than the first, unless what it left out is gone."""
    start = torch.nn.Parameter(torch.zeros(1024))
    g = torch.randn(1024, generator=torch.Generator().manual_seed(4))

    def changed(optimizer, tensor):
        before = tensor.detach().clone()
        tensor.grad = g.clone()
        optimizer.step()
        return set(torch.nonzero(tensor.detach() != before).view(-1).tolist())

    settings = {"compression": top_k(0.05, saved=False), "lr": 1e-2}
    (tensor,) = copies([start])
    with open_optimizer([tensor], path=tmp_path / "state", **settings) as optimizer:
        first, second = changed(optimizer, tensor), changed(optimizer, tensor)
        assert len(first) < len(second)  # moments of the first ones go on
        assert "residual" not in [array.name for array in optimizer.store.manifest.arrays]
        optimizer.rollback()
        assert changed(optimizer, tensor) == first
    (again,) = copies([start])
    with open_optimizer([again], path=tmp_path / "state", resume=True, **settings) as optimizer:
        assert changed(optimizer, again) == first
