from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nearflash.abi.bitmap import BitmapHeader
from nearflash.abi.errors import StreamError, UnknownDeviceError
from nearflash.device import open_device
from nearflash.model.weights import dequantize
from nearflash.support.threads import CallingThread
from nearflash.weights import QuantizedMatrix, expand, pack, quantize

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


@pytest.mark.parametrize("matrix", [PRUNED, PRUNED.view(np.uint16), PRUNED.view(np.int8), quantize(PRUNED, 4)])
def test_a_group_of_another_matrix_is_refused(matrix):
    """Under checksums that hold: a row group of another tensor expanded in its place."""
    quantized = isinstance(matrix, QuantizedMatrix)
    other = replace(matrix, codes=matrix.codes ^ 1) if quantized else matrix[:, ::-1]
    own, theirs = (pack(each, group_rows=8) for each in (matrix, other))
    starts = _group_starts(own)
    assert len(starts) == 4 and _group_starts(theirs) == starts
    for first, last in pairwise(starts):
        with pytest.raises(StreamError, match="ends of groups that its header does not state"):
            expand(own[:first] + theirs[first:last] + own[last:])


def _group_starts(stream):
    """Of every group of a stream, and its end."""
    starts, at = [len(stream)], len(stream)
    while at > 64:
        at -= 64 + int.from_bytes(stream[at - 56 : at - 48], "little")
        starts.append(at)
    return starts[::-1]


def test_a_stream_that_does_not_state_its_groups_is_refused():
    stream = pack(PRUNED)
    header = replace(BitmapHeader.unpack(stream[:64], len(stream)), ends_crc32c=None)
    with pytest.raises(StreamError, match=r"does not state its groups, .*; compress the weights again"):
        expand(header.pack() + stream[64:])


@pytest.mark.parametrize("device", ["cuda", "cuda:99"])
def test_a_gpu_that_is_not_there_is_named(device, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnknownDeviceError, match=f"device must be host: torch finds no GPU here, not '{device}'"):
        expand(pack(PRUNED), device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnknownDeviceError, match="device must be host, or one of cuda:0, cuda:1, not 'cuda:99'"):
        expand(pack(PRUNED), "cuda:99")


def test_a_device_without_the_kernel_lists_those_that_have_it():
    with pytest.raises(UnknownDeviceError, match=r"device must be one of bit, host, model, .*, not 'hls'"):
        expand(pack(PRUNED), "hls")


def test_a_header_with_more_elements_than_the_stream_has_bits():
    """No memory is asked for: forged headers gave a MemoryError."""
    stream = pack(np.ones((4, 64), np.float16))
    header = BitmapHeader.unpack(stream[:64], len(stream))
    forged = replace(header, rows=1 << 31, columns=1 << 20, group_rows=1 << 31).pack() + stream[64:]
    with pytest.raises(StreamError, match=f"{len(stream)} bytes, 2147483648 x 1048576 elements"):
        expand(forged)


def test_an_executor_of_the_callers_gives_the_same_bits():
    values = np.random.default_rng(4).standard_normal((64, 300)).astype(np.float16)
    assert (expand(pack(values), executor=CallingThread()) == values).all()
