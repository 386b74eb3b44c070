"""Number formats and the one rounding from double to fp32."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import FORMATS, fp32_bits, fp32_round, fp32_value


def test_fp32_rounding_agrees_with_numpy() -> None:
    values = np.random.default_rng(1).standard_normal(1000) * 10.0 ** np.random.default_rng(2).integers(-45, 38, 1000)
    assert [fp32_bits(float(v)) for v in values] == values.astype(np.float32).view(np.uint32).tolist()
    assert fp32_value(fp32_bits(0.1)) == fp32_round(0.1) == float(np.float32(0.1))


def test_a_scalar_past_fp32_is_refused() -> None:
    with pytest.raises(CommandError, match="must be within the fp32 range, not 1e\\+39"):
        fp32_bits(1e39)


def test_widths_add_up() -> None:
    for f in FORMATS.values():
        assert f.bits == 1 + f.exponent_bits + f.mantissa_bits
    assert FORMATS["fp32"].bias == 127
    assert FORMATS["fp32"].canonical_nan == 0x7FC00000
