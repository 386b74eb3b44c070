"""One state over several devices: the same bits as on one."""

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, DeviceError, StateError
from nearflash.device import open_device


def bits(optimizer, tensors):
    stored = [optimizer.store.read_array(array).view(np.uint32) for array in "pmv"]
    return [*stored, *(t.detach().reshape(-1).numpy().view(np.uint32) for t in tensors)]


def copies(tensors):
    return [torch.nn.Parameter(t.detach().clone()) for t in tensors]


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_the_same_bits_on_one_two_and_four_devices(tensors, open_optimizer, tmp_path, overlap):
    found, host = [], "host:update-smartssd"
    for count in (1, 2, 4):
        mine = copies([t for t in tensors for _ in "abc"])
        optimizer = open_optimizer(
            mine,
            path=[tmp_path / f"{count}-{i}" for i in range(count)],
            device=[host, "model:update-tiny"] * 2 if count == 4 else [host] * count,
            stripe_ratio=[3, 1] if count == 2 else None,
            max_grad_norm=40.0,
            overlap=overlap,
            resident_bytes=12 * 1024,
        )
        assert len(optimizer.store.paths) == count and all(path.stat().st_size for path in optimizer.store.paths)
        for step in range(4):
            generator = torch.Generator().manual_seed(60 + step)
            optimizer.zero_grad()
            sum((t * torch.randn(t.shape, generator=generator)).sum() for t in mine).backward()
            optimizer.step()
        found.append(bits(optimizer, mine))
    for other in found[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_files_in_another_order_stay_beside_their_devices(tensors, set_gradients, open_optimizer, tmp_path):
    names = ["a", "b"]
    with open_device("model:update-tiny") as first, open_device("host:update-smartssd") as second:
        for order in ([0, 1], [1, 0]):
            devices = dict(zip(names, (first, second), strict=True))
            given = [names[i] for i in order]
            optimizer = open_optimizer(
                tensors, path=[tmp_path / n for n in given], device=[devices[n] for n in given], resume="auto"
            )
            set_gradients(tensors, optimizer.steps)
            optimizer.step()
            assert [t.device for t in optimizer._optimizer_state._schedule.transfers] == [first, second]
            optimizer.close()
    assert optimizer.store.path == tmp_path / "b"


def test_a_failure_of_one_device_leaves_all_at_the_step_before(tensors, set_gradients, open_optimizer, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with open_device("host:update-smartssd") as good, open_device("host:update-smartssd") as bad:
        optimizer = open_optimizer(tensors, path=paths, device=[good, bad])
        set_gradients(tensors, 0)
        optimizer.step()
        before = bits(optimizer, tensors)
        real = bad.wait

        def fail(*_):
            raise DeviceError("ended with READ_ERROR")

        bad.wait = fail
        set_gradients(tensors, 1)
        with pytest.raises(DeviceError, match="READ_ERROR"):
            optimizer.step()
        bad.wait = real
        assert optimizer.steps == 1
        assert all(np.array_equal(one, two) for one, two in zip(before, bits(optimizer, tensors), strict=True))
        optimizer.step()
        assert optimizer.steps == 2 and optimizer.store.verify() == []
        optimizer.close()
    open_optimizer(tensors, path=paths[::-1], device=["host:update-smartssd"] * 2, resume=True)


def test_a_directory_gets_a_file_for_each_device(tensors, open_optimizer, tmp_path):
    optimizer = open_optimizer(tensors, path=tmp_path, device=["host:update-smartssd"] * 2)
    assert [path.name for path in optimizer.store.paths] == ["optimizer.state", "optimizer.1.state"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer.1.state", "optimizer.state"]


def test_bad_sets_are_refused(tensors, open_optimizer, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(CommandError, match="path must name 2 files, one for each device, not 1"):
        open_optimizer(tensors, path=paths[:1], device=["host:update-smartssd"] * 2)
    open_optimizer(tensors, path=paths, device=["host:update-smartssd"] * 2).close()
    with pytest.raises(StateError, match="has 2 files, not 1: give also number 1"):
        open_optimizer(tensors, path=paths[0], resume=True)
    with pytest.raises(StateError, match="must be a state file, not a missing one"):
        open_optimizer(tensors, path=[paths[0], tmp_path / "c"], device=["host:update-smartssd"] * 2, resume="auto")
