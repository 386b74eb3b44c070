import numpy as np
import pytest

from nearflash.abi.errors import StreamError, UnknownDeviceError
from nearflash.device import open_device
from nearflash.model.weights import dequantize
from nearflash.weights import expand, pack, quantize

RNG = np.random.default_rng(1)
PRUNED = RNG.standard_normal((24, 700)).astype(np.float16) * (RNG.random((24, 700)) < 0.5)


@pytest.mark.parametrize("matrix", [PRUNED, PRUNED.view(np.uint16), PRUNED.view(np.int8)], ids=["fp16", "bf16", "int8"])
@pytest.mark.parametrize("device", ["host", "model"])
def test_a_matrix_comes_back_to_the_bit_and_of_its_type(matrix, device):
    dense = expand(pack(matrix), device)
    assert dense.dtype == matrix.dtype and dense.tobytes() == matrix.tobytes()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_a_quantised_matrix_expands_to_its_values(bits, dtype):
    matrix = np.abs(PRUNED).view(dtype)
    own = quantize(matrix, bits)
    model = dequantize.ScaledMatrix(own.codes, own.present, own.scales, own.element, own.output)
    assert (expand(pack(own)).view(np.uint16) == model.dense()).all()
    if dtype is np.float16:
        assert np.abs(expand(pack(own)) - matrix).max() < 4.5 / (2**bits - 1)


def test_an_open_device_is_used_and_stays_open():
    with open_device("host:expand-tiny") as device:
        assert (expand(pack(PRUNED), device) == PRUNED).all()
        assert (expand(pack(PRUNED), device) == PRUNED).all()


def test_a_damaged_stream_raises_and_gives_no_matrix():
    stream = bytearray(pack(PRUNED))
    stream[2000] ^= 1
    with pytest.raises(StreamError):
        expand(bytes(stream))
    with pytest.raises(StreamError, match="must end where its header states, not after 0 bytes"):
        expand(b"")


def test_a_device_without_the_kernel_lists_those_that_have_it():
    with pytest.raises(UnknownDeviceError, match=r"device must be one of host, model, .*, not 'hls'"):
        expand(pack(PRUNED), "hls")
