"""The expanders' kernels against the model: dense output to the bit, and every fault by name."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import StreamError
from nearflash.abi.kernel.config import update_config
from nearflash.abi.topk import HEADER_BYTES, TILE_PARAMS, StreamFault, StreamHeader, ValueFormat
from nearflash.device.memory import anonymous
from nearflash.model.gradients.topk import expand, pack
from nearflash.model.weights.bitmap import expand_row
from nearflash.sim.hls.build import HLS
from nearflash.sim.hls.library import HlsLibrary

GUARD = 64
"""Bytes behind an output that must stay."""


@pytest.fixture(scope="module", params=["update-smartssd", pytest.param("update-tiny", marks=pytest.mark.full)])
def kernels(request):
    config = update_config(request.param)
    return {name: HlsLibrary.build(name, (HLS / "kernels" / f"{name}.cpp").read_text(), config)
            for name in ("expand_topk", "expand_bitmap")}  # fmt: skip


def paged(data: bytes):
    memory = anonymous(len(data) // 4096 * 4096 + 8192)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory


def expand_topk(kernels, stream: bytes, params: int):
    """Patterns of the dense gradients, (params,), and the fault."""
    source, dense, fault = paged(stream), anonymous(-(-4 * params // 4096) * 4096 + 4096), np.zeros(1, np.uint32)
    dense[:] = 0xA5
    kernels["expand_topk"].run([source.ctypes.data, dense.ctypes.data, len(stream), params, fault.ctypes.data])
    assert (dense[4 * params :] == 0xA5).all(), "bytes behind the gradients must stay"
    return dense[: 4 * params].view(np.uint32), StreamFault(int(fault[0]))


def random_stream(params: int, density: float, value_format: ValueFormat, seed: int = 1) -> bytes:
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(params) < density)
    number = value_format.number_format
    values = rng.integers(0, 1 << number.bits, indices.size, np.uint64).astype(np.uint32)
    return pack(indices, values, params, value_format)


@pytest.mark.parametrize("value_format", ValueFormat)
@pytest.mark.parametrize(
    ("params", "density"), [(1, 1.0), (7, 0.5), (4096, 1.0), (4097, 0.1), (20_000, 0.02), (9000, 0.0)]
)
def test_topk_streams_expand_as_the_model_says(kernels, params, density, value_format):
    stream = random_stream(params, density, value_format)
    dense, fault = expand_topk(kernels, stream, params)
    assert fault is StreamFault.NONE
    np.testing.assert_array_equal(dense, expand(stream, params).view(np.uint32))


def damaged() -> dict[str, tuple[bytes, int]]:
    """Streams with one thing wrong, and the parameters they are said to be for."""
    params = TILE_PARAMS + 100
    good = random_stream(params, 0.01, ValueFormat.FP16)
    header = StreamHeader.unpack(good[:HEADER_BYTES], params, len(good))
    body = good[HEADER_BYTES:]

    def bits(position: int) -> bytes:
        return good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :]

    indices, values = np.array([5, 900, 4100]), np.array([1, 2, 3], np.uint32)
    descending = pack(np.array([900, 5, 4100]), values, params, ValueFormat.FP32)
    beyond = pack(np.array([5, 900, params + 3]), values, params, ValueFormat.FP32)
    assert (indices < params).all()
    return {
        "magic": (bits(0), params),
        "version": (bits(4), params),
        "header": (bits(16), params),
        "other params": (good, params + 1),
        "value": (bits(len(good) - 9), params),
        "count": (bits(HEADER_BYTES + 1), params),
        "tiles swapped": (replace(header).pack() + body[::-1], params),
        "cut": (good[: len(good) - 8], params),
        "cut and said so": (replace(header, stream_bytes=len(good) - 8).pack() + body[:-8], params),
        "pairs": (replace(header, pairs=header.pairs + 1).pack() + body, params),
        "empty": (b"", params),
        "short header": (good[:24], params),
        "order": (descending, params),
        "range": (beyond, params),
    }


@pytest.mark.parametrize("what", damaged())
def test_damaged_topk_streams_are_refused_by_the_models_name(kernels, what):
    stream, params = damaged()[what]
    with pytest.raises(StreamError) as expected:
        expand(stream, params)
    assert expand_topk(kernels, stream, params)[1] == expected.value.fault
    good = random_stream(params, 0.01, ValueFormat.BF16)
    dense, fault = expand_topk(kernels, good, params)
    assert fault is StreamFault.NONE, "a bad stream must leave nothing behind"
    np.testing.assert_array_equal(dense, expand(good, params).view(np.uint32))


@pytest.mark.parametrize(
    ("elements", "density"), [(1, 1.0), (63, 0.5), (64, 0.0), (65, 1.0), (1000, 0.5), (100_003, 0.3)]
)
def test_bitmaps_expand(kernels, elements, density):
    rng = np.random.default_rng(elements)
    mask = rng.random(elements) < density
    values = rng.integers(1, 1 << 16, np.count_nonzero(mask), np.uint16)
    expected = expand_row(np.packbits(mask, bitorder="little").tobytes(), values.tobytes(), elements, "<u2")
    dense, fault = expand_bitmap(kernels, mask, values)
    assert fault == 0
    np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_bitmap_of_another_number_of_ones_is_a_fault(kernels, extra):
    mask = np.arange(300) % 3 == 0
    _, fault = expand_bitmap(kernels, mask, np.ones(np.count_nonzero(mask) + extra, np.uint16))
    assert fault == 1


def expand_bitmap(kernels, mask, values):
    size = -(-2 * mask.size // 4096) * 4096
    bitmap, packed = paged(np.packbits(mask, bitorder="little").tobytes()), paged(values.tobytes())
    dense, fault = anonymous(size + 4096), np.zeros(1, np.uint32)
    dense[:] = 0xA5
    addresses = [x.ctypes.data for x in (bitmap, packed, dense)]
    kernels["expand_bitmap"].run([*addresses, mask.size, values.size, fault.ctypes.data])
    assert (dense[2 * mask.size :] == 0xA5).all(), "bytes behind the elements must stay"
    return dense[: 2 * mask.size].view(np.uint16), int(fault[0])
