import numpy as np
import pytest

from nearflash.abi.errors import StreamError
from nearflash.abi.formats import BF16, FP16, FP32
from nearflash.abi.topk import HEADER_BYTES, ValueFormat
from nearflash.model.gradients.topk import expand, fp32_pattern, pack
from nearflash.verify.fixtures.gradients import bad_streams, random_pairs

BAD = bad_streams()


@pytest.mark.parametrize("value_format", ValueFormat)
@pytest.mark.parametrize(("params", "density"), [(1, 0.0), (1, 1.0), (4096, 0.25), (4097, 1.0), (9000, 0.01)])
def test_a_stream_gives_its_pairs_back(value_format, params, density):
    rng = np.random.default_rng(params)
    indices, bits = random_pairs(rng, params, density, value_format)
    expected = np.zeros(params, np.uint32)
    expected[indices] = [fp32_pattern(int(x), value_format.number_format) for x in bits]
    found = expand(pack(indices, bits, params, value_format), params)
    np.testing.assert_array_equal(found.view(np.uint32), expected)


def test_bytes_of_a_small_stream():
    """Written out by hand: two pairs of one tile, and an empty tile."""
    stream = pack(np.array([1, 4095]), np.array([0x3C00, 0xC000], np.uint32), 4097, ValueFormat.FP16)
    assert stream[HEADER_BYTES : HEADER_BYTES + 4] == bytes([2, 0, 0, 0])
    assert stream[HEADER_BYTES + 8 : HEADER_BYTES + 24].hex() == "0100ff0f00000000" + "003c00c000000000"
    assert stream[HEADER_BYTES + 24 : HEADER_BYTES + 28] == bytes(4)
    assert len(stream) == HEADER_BYTES + 32
    dense = expand(stream, 4097)
    assert (dense[1], dense[4095], np.count_nonzero(dense)) == (1.0, -2.0, 2)


def test_fp16_values_are_those_of_numpy():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    mine = np.array([fp32_pattern(int(x), FP16) for x in patterns], np.uint32)
    with np.errstate(invalid="ignore"):
        theirs = patterns.view(np.float16).astype(np.float32)
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(mine[number], theirs.view(np.uint32)[number])
    np.testing.assert_array_equal(mine[~number] >> 13 & 1023, patterns[~number] & 1023)
    assert np.isnan(mine[~number].view(np.float32)).all()


def test_bf16_and_fp32_values_are_their_bits():
    assert (fp32_pattern(0x7FC1, BF16), fp32_pattern(0x80000001, FP32)) == (0x7FC10000, 0x80000001)


@pytest.mark.parametrize("name", BAD)
def test_bad_streams_are_refused_by_name(name):
    bad = BAD[name]
    with pytest.raises(StreamError) as raised:
        expand(bad.stream, bad.params)
    assert raised.value.fault == bad.fault, raised.value
