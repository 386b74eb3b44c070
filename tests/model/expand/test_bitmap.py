import numpy as np
import pytest

from nearflash.abi.bitmap import BitmapHeader, ElementFormat
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import StreamFault
from nearflash.model.expand.bitmap import expand, pack


def random_matrix(seed, shape, density, element):
    rng = np.random.default_rng(seed)
    bits = element.number_format.bits
    values = rng.integers(1, 1 << bits, shape, f"u{bits // 8}")
    return np.where(rng.random(shape) < density, values, values.dtype.type(0))


@pytest.mark.parametrize("element", ElementFormat)
@pytest.mark.parametrize(("shape", "density"), [((1, 1), 1.0), ((5, 513), 0.5), ((3, 512), 0.0), ((4, 100), 1.0)])
def test_a_matrix_comes_back(element, shape, density):
    matrix = random_matrix(1, shape, density, element)
    np.testing.assert_array_equal(expand(pack(matrix, element, group_rows=2)), matrix)


def test_size_at_half_density_is_nine_sixteenths():
    """Endor's figure for 16 bits: 1/16 for the bitmap, 1/2 for the values; the rest is padding."""
    matrix = random_matrix(2, (8, 8192), 0.5, ElementFormat.FP16)
    assert len(pack(matrix, ElementFormat.FP16, 8)) / matrix.nbytes == pytest.approx(0.5625, rel=0.01)


def test_bytes_of_a_small_matrix():
    stream = pack(np.array([[0, 0x8000, 0, 7]], np.uint16), ElementFormat.FP16, 1)
    assert len(stream) == 64 * 4
    assert stream[64:66] == bytes([0b1010, 0]) and stream[128:134] == bytes([0, 0x80, 7, 0, 0, 0])


GOOD = pack(random_matrix(3, (5, 600), 0.3, ElementFormat.FP16), ElementFormat.FP16, 2)


LONGER = BitmapHeader(ElementFormat.FP16, 5, 600, 2, len(GOOD) + 64)


def patched(at, text):
    return GOOD[:at] + text + GOOD[at + len(text) :]


@pytest.mark.parametrize(
    ("stream", "fault"),
    [
        (b"", StreamFault.LENGTH),
        (GOOD[:60], StreamFault.LENGTH),
        (patched(0, b"NFTK"), StreamFault.HEADER),
        (patched(4, b"\2"), StreamFault.HEADER),
        (patched(40, b"\1"), StreamFault.CHECKSUM),
        (GOOD[:-64], StreamFault.LENGTH),
        (GOOD + bytes(64), StreamFault.LENGTH),
        (BitmapHeader(ElementFormat.FP16, 5, 600, 2, len(GOOD) - 64).pack() + GOOD[64:-64], StreamFault.LENGTH),
        (
            BitmapHeader(ElementFormat.FP16, 5, 600, 2, len(GOOD) + 64).pack() + GOOD[64:] + bytes(64),
            StreamFault.LENGTH,
        ),
        (patched(192, b"\x55\xaa"), StreamFault.CHECKSUM),
        (patched(len(GOOD) - 64, b"\7"), StreamFault.CHECKSUM),
    ],
)
def test_bad_matrices_are_refused_by_name(stream, fault):
    with pytest.raises(StreamError) as raised:
        expand(stream)
    assert raised.value.fault == fault, raised.value
