"""A model of the optimizer in plain arrays, and small sets of tensors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nearflash.abi.optimizers import AdamStep
from nearflash.model.update.lane import optimizer_step
from nearflash.storage import ARRAYS, StateStore
from nearflash.training import NearStorageAdamW

SHAPES = {"embed": (70, 30), "scale": (), "norm": (30,), "empty": (0,), "head": (5, 7, 11)}


class Reference:
    """p, m, v of each tensor, advanced by nearflash.model alone."""

    def __init__(self, tensors):
        self.p = [t.detach().float().numpy().reshape(-1).copy() for t in tensors]
        self.m = [np.zeros_like(p) for p in self.p]
        self.v = [np.zeros_like(p) for p in self.p]
        self.steps = [0] * len(self.p)

    def step(self, tensors, scalars: Callable[[int], dict]):
        for i, tensor in enumerate(tensors):
            if tensor.grad is None:
                continue
            self.steps[i] += 1
            adam = AdamStep(step=self.steps[i], **scalars(i))
            gradient = tensor.grad.float().numpy().reshape(-1)
            new = optimizer_step(adam, gradient, self.p[i], self.m[i], self.v[i])
            self.p[i], self.m[i], self.v[i] = new.p, new.m, new.v


def stored(path):
    """(step, {array: [values of each tensor]}) of a state file."""
    with StateStore.open(path) as state:
        flat = {array: state.read_array(array) for array in ARRAYS}
        ranges = [slice(t.start, t.start + t.params) for t in state.manifest.tensors]
        return state.steps, {array: [flat[array][r] for r in ranges] for array in ARRAYS}


@pytest.fixture
def read_state():
    return stored


@pytest.fixture
def make_reference():
    return Reference


@pytest.fixture
def tensors():
    """Trainable fp32 tensors of odd shapes, seeded."""
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]


@pytest.fixture
def set_gradients():
    """Give each tensor the gradient of a step, or None where listed."""

    def fill(tensors, step, without=()):
        generator = torch.Generator().manual_seed(1000 + step)
        for index, tensor in enumerate(tensors):
            gradient = torch.randn(tensor.shape, generator=generator) * 10.0 ** (index - 3)
            tensor.grad = None if index in without else gradient.to(tensor.dtype)

    return fill


@pytest.fixture
def open_optimizer(tmp_path):
    """A NearStorageAdamW on tmp_path/state with short extents, closed at the end."""
    opened = []

    def open_it(params, **kwargs):
        options = {"path": tmp_path / "state", "device": "host:update-smartssd", "extent_params": 1024}
        opened.append(NearStorageAdamW(params, **(options | kwargs)))
        return opened[-1]

    yield open_it
    for optimizer in opened:
        optimizer.close()
