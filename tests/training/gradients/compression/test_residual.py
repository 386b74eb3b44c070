import numpy as np
import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.training.gradients.compression.residual import BLOCK_PARAMS, ExactResidual, QuantizedResidual

CPU = torch.device("cpu")


def read(residual, start, params):
    return residual.add(start, torch.zeros(params))


@pytest.mark.parametrize("kind", [ExactResidual, QuantizedResidual])
def test_ranges_do_not_touch_each_other_and_arrays_bring_them_back(kind):
    torch.manual_seed(1)
    residual = kind(128, CPU)
    first, second = torch.randn(32), torch.randn(64)
    residual.write(64, residual.pack(second))
    residual.write(16, residual.pack(first))
    kept = read(residual, 64, 64)
    assert not read(residual, 0, 16).any() and not read(residual, 48, 16).any()
    other = kind(128, CPU)
    other.load({name: array.copy() for name, array in residual.arrays().items()})
    assert torch.equal(read(other, 0, 128), read(residual, 0, 128)) and torch.equal(read(other, 64, 64), kept)


def test_exact_values_are_exact():
    residual, values = ExactResidual(16, CPU), torch.randn(16)
    residual.write(0, residual.pack(values))
    assert torch.equal(read(residual, 0, 16), values)


def test_four_bits_lose_half_a_scale_at_most():
    torch.manual_seed(2)
    values = torch.randn(64, BLOCK_PARAMS) * torch.logspace(-20, 20, 64)[:, None]
    values[3] = 0
    residual = QuantizedResidual(values.numel(), CPU)
    residual.write(0, residual.pack(values.view(-1)))
    error = (read(residual, 0, values.numel()).view_as(values) - values).abs()
    assert (error <= values.abs().amax(dim=1, keepdim=True) / 14 * (1 + 2**-6)).all()
    assert sum(array.nbytes for array in residual.arrays().values()) * 8 == 5 * values.numel()


def test_four_bits_of_tiny_values_are_zero():
    residual = QuantizedResidual(16, CPU)
    residual.write(0, residual.pack(torch.full((16,), 1e-44)))
    assert torch.isfinite(read(residual, 0, 16)).all()


def test_arrays_of_another_kind_are_refused():
    message = r"the residual must consist of {'residual': 32}, not of {'residual': 16, 'residual_scale': 2}"
    with pytest.raises(StateError, match=message):
        ExactResidual(32, CPU).load(QuantizedResidual(32, CPU).arrays())


def test_loading_does_not_share_memory():
    values = {"residual": np.ones(16, np.float32)}
    residual = ExactResidual(16, CPU)
    residual.load(values)
    values["residual"][:] = 2
    assert read(residual, 0, 16)[0].item() == 1
