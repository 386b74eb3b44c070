import numpy as np
import pytest

from nearflash.abi.errors import CommandError, StreamError
from nearflash.abi.topk import ValueFormat
from nearflash.device.backends.host.topk import decode_values, encode_values, expand, pack
from nearflash.model.gradients import topk as model
from nearflash.verify.fixtures.gradients import bad_streams, random_pairs

BAD = bad_streams()


def random_values(rng, count):
    """Of all magnitudes, subnormals too."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    return np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), np.float32(0))


@pytest.mark.parametrize("value_format", ValueFormat)
@pytest.mark.parametrize(("params", "density"), [(1, 0.0), (1, 1.0), (4096, 0.25), (4097, 1.0), (30_000, 0.01)])
def test_streams_and_gradients_are_those_of_the_model(value_format, params, density):
    rng = np.random.default_rng(params)
    indices, _ = random_pairs(rng, params, density, value_format)
    bits = encode_values(random_values(rng, len(indices)), value_format)
    stream = pack(indices, bits, params, value_format)
    assert stream.tobytes() == model.pack(indices, bits.astype(np.uint32), params, value_format)
    expected = model.expand(stream.tobytes(), params)
    np.testing.assert_array_equal(expand(stream, params).view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(expected[indices], decode_values(bits, value_format))


@pytest.mark.parametrize("name", BAD)
def test_bad_streams_are_refused_as_by_the_model(name):
    bad = BAD[name]
    with pytest.raises(StreamError) as raised:
        expand(np.frombuffer(bad.stream, np.uint8), bad.params)
    assert raised.value.fault == bad.fault, raised.value


def test_values_round_to_nearest_even_and_stay_finite():
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 70_000, -1e30, 2**-25, -0.0], np.float32)
    halves = encode_values(values, ValueFormat.FP16)
    assert decode_values(halves, ValueFormat.FP16).tolist() == [1, 1 + 2**-9, 65504, -65504, 0, 0]
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38], np.float32)
    brains = encode_values(values, ValueFormat.BF16)
    assert decode_values(brains, ValueFormat.BF16)[:2].tolist() == [1, 1 + 2**-6]
    assert brains[2] == 0x7F7F


@pytest.mark.parametrize("indices", [[1, 1], [2, 1], [-1, 0], [0, 9]])
def test_indices_must_ascend_below_params(indices):
    with pytest.raises(CommandError, match="indices must ascend from 0 to below 9, not otherwise; sort them"):
        pack(np.array(indices), np.zeros(2, np.uint16), 9, ValueFormat.FP16)
