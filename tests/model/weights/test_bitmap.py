import numpy as np
import pytest

from nearflash.abi.bitmap import GROUP_END, SECTIONS, BitmapHeader, Coding, ElementFormat, Section, section_bytes
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import StreamFault
from nearflash.model.weights.bitmap import expand, pack, pack_scaled, read_rows
from nearflash.model.weights.dequantize import quantize

FP16, BF16, INT8, INT4 = ElementFormat
SHAPES = [((1, 1), 1.0), ((5, 513), 0.5), ((3, 512), 0.0), ((4, 100), 1.0)]


def random_matrix(seed, shape, density, element):
    rng = np.random.default_rng(seed)
    bits = element.number_format.bits
    values = rng.integers(1, 1 << bits, shape, f"u{bits // 8}")
    return np.where(rng.random(shape) < density, values, values.dtype.type(0))


def weights(seed, shape, density, element):
    """Normal values of fp16 or bf16, as weights are."""
    values = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
    patterns = values.astype(np.float16).view(np.uint16) if element is FP16 else values.view("<u2")[..., 1::2]
    return np.where(np.random.default_rng(seed + 1).random(shape) < density, patterns, np.uint16(0))


@pytest.mark.parametrize("element", [FP16, BF16, INT8])
@pytest.mark.parametrize(("shape", "density"), SHAPES)
def test_a_matrix_comes_back(element, shape, density):
    matrix = random_matrix(1, shape, density, element)
    np.testing.assert_array_equal(expand(pack(matrix, element, group_rows=2)), matrix)


@pytest.mark.parametrize("element", [FP16, BF16])
@pytest.mark.parametrize(("shape", "density"), SHAPES)
@pytest.mark.parametrize("make", [random_matrix, weights])
def test_coding_is_lossless(element, shape, density, make):
    """Random patterns have subnormals, infinities and NaNs, and mostly escapes; each group has its own codebook."""
    matrix = make(1, shape, density, element)
    matrix[1:2] = 0
    matrix[0, 0] = 0x8000
    stream = pack(matrix, element, 2, Coding.EXPONENTS)
    np.testing.assert_array_equal(expand(stream), matrix)


@pytest.mark.parametrize("element", [INT8, INT4])
@pytest.mark.parametrize("output", [FP16, BF16])
@pytest.mark.parametrize(("shape", "density"), SHAPES)
def test_scaled_elements_expand_to_their_values(element, output, shape, density):
    """Which elements have a value is the writer's choice: some of these codes are zero."""
    matrix = quantize(weights(2, shape, density, output), element, output)
    np.testing.assert_array_equal(expand(pack_scaled(matrix, 2)), matrix.dense())
    assert density == 0 or (matrix.codes[matrix.present] == 0).any()


@pytest.mark.parametrize(
    ("element", "coding", "output", "share"),
    [
        (FP16, Coding.PLAIN, None, 0.5625),
        (BF16, Coding.PLAIN, None, 0.5625),
        (INT8, Coding.PLAIN, None, 0.625),
        (FP16, Coding.EXPONENTS, None, 0.469),
        (BF16, Coding.EXPONENTS, None, 0.375),
        (INT8, Coding.PLAIN, FP16, 0.344),
        (INT4, Coding.PLAIN, BF16, 0.219),
    ],
)
def test_sizes_at_half_density(element, coding, output, share):
    """Of dense, as docs/contracts/weights.md says; the rest is padding, and in coded rows the escapes: few in pruned
    weights."""
    dense = output or element
    matrix = (weights if dense is not INT8 else random_matrix)(2, (4, 16384), 1.0, dense)
    size = matrix & matrix.dtype.type(0x7FFF if dense is not INT8 else 0x7F)
    matrix[size < np.median(size)] = 0
    if output:
        stream, escapes = pack_scaled(quantize(matrix, element, output), 4), 0
    else:
        stream = pack(matrix, element, 4, coding)
        escapes = sum(row.fields.get(Section.ESCAPES, np.zeros(0)).size for row in read_rows(stream))
    assert escapes < 0.1 * np.count_nonzero(matrix)
    assert (len(stream) - escapes) / matrix.nbytes == pytest.approx(share, rel=0.02)


def test_bytes_of_a_small_matrix():
    stream = pack(np.array([[0, 0x8000, 0, 7]], np.uint16), FP16, 1)
    assert len(stream) == 64 * 4
    assert stream[64:66] == bytes([0b1010, 0]) and stream[128:134] == bytes([0, 0x80, 7, 0, 0, 0])


def test_bytes_of_a_small_coded_matrix():
    """Codebook, bitmap, low, codes, escapes, values; a row without values is its bitmap."""
    matrix = np.array([[0, 0xBC07, 0x3C00], [0, 0, 0], [0x7C00, 0x0001, 0x4000]], np.uint16)
    stream = pack(matrix, FP16, 3, Coding.EXPONENTS)
    starts = [stream[at : at + 4].hex() for at in range(64, len(stream) - 64, 64)]
    assert starts == [
        "0f001000",
        *("06000000", "01000000", "0c000000", "80000000"),
        "00000000",
        *("07000000", "02000000", "13020000", "1f000000", "00000000"),
    ]
    assert GROUP_END.unpack(stream[-64:]) == (0, crc32c(stream[64:-64]))


def test_bytes_of_a_small_scaled_matrix():
    matrix = quantize(np.array([[0x3C00, 0, 0x4B80, 0x3C00]], np.uint16), INT4, FP16)
    starts = [pack_scaled(matrix, 1)[at : at + 4].hex() for at in (64, 128, 192)]
    assert starts == ["0d000000", "773b003c", "f0000000"]


def test_rows_are_read_before_a_fault_behind_them():
    found = []
    with pytest.raises(StreamError):
        for row in read_rows(patched(GOOD, len(GOOD) - 64, b"\7")):
            found.append(row.number)
    assert found == list(range(5))


GOOD = pack(random_matrix(3, (5, 600), 0.3, FP16), FP16, 2)
CODED = pack(random_matrix(3, (5, 600), 0.3, BF16), BF16, 2, Coding.EXPONENTS)
SCALED = pack_scaled(quantize(weights(3, (5, 600), 0.3, FP16), INT4, FP16), 2)


def patched(stream, at, text):
    return stream[:at] + text + stream[at + len(text) :]


def said_to_have(stream, more):
    """The stream with a header that says so many bytes more."""
    header = BitmapHeader.unpack(stream[:64], len(stream))
    fields = (header.element, header.rows, header.columns, header.group_rows, len(stream) + more)
    return BitmapHeader(*fields, header.coding, header.output).pack() + stream[64:]


FAULTS = [
    (b"", StreamFault.LENGTH),
    (GOOD[:60], StreamFault.LENGTH),
    (patched(GOOD, 0, b"NFTK"), StreamFault.HEADER),
    (patched(GOOD, 4, b"\2"), StreamFault.HEADER),
    (patched(GOOD, 40, b"\1"), StreamFault.CHECKSUM),
    *((stream[:-64], StreamFault.LENGTH) for stream in (GOOD, CODED, SCALED)),
    *((stream + bytes(64), StreamFault.LENGTH) for stream in (GOOD, CODED, SCALED)),
    *((said_to_have(stream, -64)[:-64], StreamFault.LENGTH) for stream in (GOOD, CODED, SCALED)),
    *((said_to_have(stream, 64) + bytes(64), StreamFault.LENGTH) for stream in (GOOD, CODED, SCALED)),
    *((said_to_have(stream, 128 - len(stream))[:128], StreamFault.LENGTH) for stream in (GOOD, CODED, SCALED)),
    (patched(GOOD, 192, b"\x55\xaa"), StreamFault.CHECKSUM),
    (patched(CODED, 65, b"\0"), StreamFault.CHECKSUM),
    *((patched(stream, len(stream) - 64, b"\7"), StreamFault.CHECKSUM) for stream in (GOOD, CODED, SCALED)),
    *((patched(stream, at + 75, b"\1"), StreamFault.COUNT) for stream, at in ((GOOD, 64), (CODED, 128), (SCALED, 64))),
    *((patched(stream, at + 127, b"\x80"), StreamFault.COUNT) for stream, at in ((GOOD, 64), (CODED, 128))),
]


@pytest.mark.parametrize(("stream", "fault"), FAULTS)
def test_bad_matrices_are_refused_by_name(stream, fault):
    with pytest.raises(StreamError) as raised:
        expand(stream)
    assert raised.value.fault == fault, raised.value


@pytest.mark.parametrize("stream", [GOOD, CODED, SCALED])
def test_a_row_is_as_long_as_its_sections(stream):
    header = BitmapHeader.unpack(stream[:64], len(stream))
    bits = SECTIONS[header.row_format]
    rows = sum(section_bytes(bits[name] * f.size) for row in read_rows(stream) for name, f in row.fields.items())
    assert len(stream) == 64 + rows + header.groups * (64 + 64 * header.coding)
