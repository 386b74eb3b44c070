"""Narrow state on the host's vectors, against the model."""

import numpy as np
import pytest

from nearflash.abi.optimizers.state import TILE_PARAMS, StateFormat
from nearflash.device.backends.host.vector.state import VectorState
from nearflash.model.update.state import decode, dither, encode

SPECIAL = np.uint32([0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xFF800000]).view(
    np.float32
)


@pytest.mark.parametrize("role", ["m", "v"])
@pytest.mark.parametrize("state_format", StateFormat)
@pytest.mark.parametrize("decades", [0, 1, 4, 10, 37])
def test_equals_the_model(state_format, role, decades):
    rng = np.random.default_rng(decades)
    n = 2 * TILE_PARAMS
    x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-decades, decades, n)).astype(np.float32)
    if decades > 20:
        x[rng.integers(0, n, 200)] = rng.choice(SPECIAL, 200)
    x = np.abs(x) if role == "v" else x
    first = 7 * TILE_PARAMS + 64
    expected = encode(x, role, state_format, dither(role, 11, first, n))
    stored = [np.empty_like(part) for part in expected]
    state = VectorState(role, state_format, 11)
    with np.errstate(all="ignore"):
        state.encode(x, first, stored)
        values = state.decode(stored, np.empty(n, np.float32))
    for actual, part in zip(stored, expected, strict=True):
        np.testing.assert_array_equal(actual.view("u1"), part.view("u1"))
    np.testing.assert_array_equal(values.view("u4"), decode(expected, role, state_format).view("u4"))


@pytest.mark.parametrize("role", ["m", "v"])
def test_every_code_at_every_scale_decodes_as_the_models(role):
    stored = [np.tile(np.arange(256, dtype=np.uint8), 255), np.repeat(np.arange(255, dtype=np.uint8), 8)]
    with np.errstate(all="ignore"):
        values = VectorState(role, StateFormat.MX8, 1).decode(stored, np.empty(stored[0].size, np.float32))
    np.testing.assert_array_equal(values.view("u4"), decode(stored, role, StateFormat.MX8).view("u4"))
