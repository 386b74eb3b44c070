"""Every code with every scale, between an Unpack and a Pack of fp32."""

import numpy as np
import pytest

from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.weights.code_product import CodeProduct
from nearflash.model.fp.convert import from_narrow
from nearflash.model.fp.mul import mul
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.verify.fixtures.fp32_unit import Fp32Unit


@pytest.fixture(scope="module")
def unit():
    return BurstUnit(Fp32Unit(CodeProduct()), "expand-code-product")


@pytest.mark.parametrize("number", [FP16, pytest.param(BF16, marks=pytest.mark.full)])
def test_every_product(unit, number):
    scales = from_narrow(np.arange(1 << 16, dtype=np.uint16), number)
    for code in range(256):
        expected, _ = mul(np.full(scales.size, code, np.float32).view(np.uint32), scales)
        np.testing.assert_array_equal(unit.run({"code": code, "scale": scales})["o"], expected)


def test_latency(unit):
    assert unit.latency() == unit.stated_latency
