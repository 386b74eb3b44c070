"""The HLS kernel of coded weights against the model: every format, code size and number of escapes, to the bit."""

from itertools import product

import numpy as np
import pytest

from nearflash.abi.bitmap import HEADER_BYTES, SECTION_BYTES, ElementFormat, section_bytes
from nearflash.abi.coded import CODEBOOK_ENTRIES_MAX, LEVELS, CodedHeader, CodedSection
from nearflash.abi.kernel.config import update_config
from nearflash.device.memory import anonymous
from nearflash.model.weights.fields import split_fields
from nearflash.model.weights.levels import expand_levels, pack_levels
from nearflash.sim.hls.build import HLS
from nearflash.sim.hls.library import HlsLibrary

ARGUMENTS = (*LEVELS, CodedSection.ESCAPES, CodedSection.LOW, CodedSection.MIDDLE, CodedSection.VALUES)
"""Sections in the order of the kernel's arguments, behind the bitmap."""


@pytest.fixture(scope="module", params=["update-tiny", "update-smartssd"])
def kernel(request):
    text = (HLS / "kernels" / "expand_levels.cpp").read_text()
    return HlsLibrary.build("expand_levels", text, update_config(request.param))


def make_words(elements: int, element: ElementFormat, spread: float, density: float):
    """Patterns whose exponents spread around a middle, with zeros: a wide spread escapes."""
    rng, number = np.random.default_rng(elements), element.number_format
    most = (1 << number.exponent_bits) - 1
    exponents = np.clip(np.round(rng.normal(most / 2, spread, elements)), 0, most).astype(np.uint16)
    rest = rng.integers(0, 1 << 16, elements, np.uint16) & ~np.uint16(most << number.mantissa_bits)
    return np.where(rng.random(elements) < density, rest | exponents << number.mantissa_bits, 0).astype(np.uint16)


def read_block(stream: bytes):
    """Header, codebook, sections as bytes and the number of their fields, of the only block of a stream."""
    header, at = CodedHeader.unpack(stream[:HEADER_BYTES], len(stream)), HEADER_BYTES + SECTION_BYTES
    book, values = stream[HEADER_BYTES : HEADER_BYTES + CODEBOOK_ENTRIES_MAX], header.elements
    sections, counts, asked = {}, {}, header.elements
    for section, bits in header.sections.items():
        count = asked if section in (*LEVELS, CodedSection.ESCAPES) else values
        sections[section], counts[section] = stream[at : at + section_bytes(bits * count)], count
        at += section_bytes(bits * count)
        fields = split_fields(sections[section], bits, count)
        if section is CodedSection.BITMAP:
            values = asked = int(fields.sum())
        elif section in LEVELS:
            asked = int(np.count_nonzero(fields == (1 << bits) - 1))
    return header, book, sections, counts


def expand(kernel, stream: bytes, **changed):
    """Patterns (elements,) and both faults; changed: other counts of fields, by section."""
    header, book, sections, counts = read_block(stream)
    counts |= {CodedSection[name]: count for name, count in changed.items()}
    held = {section: paged(sections.get(section, b"")) for section in (CodedSection.BITMAP, *ARGUMENTS)}
    codebook, size = paged(book), 2 * header.elements
    dense, faults = anonymous(-(-size // 4096) * 4096 + 4096), np.zeros(2, np.uint32)
    dense[:] = 0xA5
    numbers = [header.elements, header.has_bitmap, header.code_bits, header.element is ElementFormat.BF16]
    numbers += [counts[section] for section in (*LEVELS, CodedSection.ESCAPES)]
    addresses = [memory.ctypes.data for memory in (*held.values(), codebook, dense)]
    kernel.run([*addresses, *map(int, numbers), faults.ctypes.data, faults.ctypes.data + 4])
    assert (dense[size:] == 0xA5).all(), "bytes behind the elements must stay"
    return dense[:size].view(np.uint16), faults.tolist()


def paged(data: bytes):
    memory = anonymous(len(data) // 4096 * 4096 + 8192)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory


@pytest.mark.parametrize(
    ("element", "code_bits", "has_bitmap"),
    list(product((ElementFormat.FP16, ElementFormat.BF16), (1, 2), (False, True))),
)
@pytest.mark.parametrize(("elements", "spread"), [(1, 1.0), (65, 0.0), (4096, 1.5), (5003, 12.0)])
def test_blocks_expand_to_the_bit(kernel, element, code_bits, has_bitmap, elements, spread):
    words = make_words(elements, element, spread, 0.5 if has_bitmap else 1.0)
    stream = pack_levels(words, element, code_bits, has_bitmap, -(-elements // 64) * 64)
    np.testing.assert_array_equal(expand_levels(stream), words)
    dense, faults = expand(kernel, stream)
    assert faults == [0, 0]
    np.testing.assert_array_equal(dense, words)


def test_a_plane_without_a_field_that_codes_ask_for_is_a_fault(kernel):
    words = make_words(3000, ElementFormat.BF16, 12.0, 1.0)
    stream = pack_levels(words, ElementFormat.BF16, 2, False, 3008)
    counts = read_block(stream)[3]
    for section in (CodedSection.SECOND, CodedSection.THIRD, CodedSection.FOURTH, CodedSection.ESCAPES):
        assert expand(kernel, stream, **{section.name: counts[section] - 1})[1] == [1, 0]
    np.testing.assert_array_equal(expand(kernel, stream)[0], words)


def test_a_bitmap_with_another_number_of_ones_is_a_fault(kernel):
    words = make_words(3000, ElementFormat.BF16, 1.0, 0.5)
    stream = pack_levels(words, ElementFormat.BF16, 2, True, 3008)
    values = read_block(stream)[3][CodedSection.FIRST]
    assert expand(kernel, stream, FIRST=values - 1)[1][1] == 1
