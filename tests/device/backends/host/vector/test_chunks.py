"""Steps of 32 elements: each as numpy computes it, writing nothing beside its lanes."""

import numpy as np
import pytest

pytest.importorskip("numba")

from nearflash.abi.bitmap import ElementFormat
from nearflash.device.backends.host.bf16 import bf16_patterns, bf16_values
from nearflash.device.backends.host.vector import chunks
from nearflash.device.backends.host.vector.compiled import compiled

RNG = np.random.default_rng(1)
UNTOUCHED = 0x5A
MASKS = [0, 1, 0x80000000, 0xFFFFFFFF, *(int(word) for word in RNG.integers(0, 1 << 32, 8))]


@compiled
def expand16(out, values, mask, lanes):
    chunks.expand16(out, values, mask, lanes)


@compiled
def expand8(out, values, mask, lanes):
    chunks.expand8(out, values, mask, lanes)


@compiled
def split4(out, fields):
    chunks.split4(out, fields)


@compiled
def decode_fp16(out, book, high, codes, low, escapes, lanes):
    return chunks.decode_fp16(out, book, high, codes, low, escapes, lanes)


@compiled
def decode_bf16(out, book, high, codes, low, escapes, lanes):
    return chunks.decode_bf16(out, book, high, codes, low, escapes, lanes)


@compiled
def scale_fp16(out, codes, mask, lanes, pair):
    chunks.scale_fp16(out, codes, mask, lanes, pair)


@compiled
def scale_bf16(out, codes, mask, lanes, pair):
    chunks.scale_bf16(out, codes, mask, lanes, pair)


@compiled
def word_and_popcount(address):
    return chunks.load64(address), chunks.popcount(chunks.load64(address))


def bits_of(word):
    return (word >> np.arange(32, dtype=np.uint64) & np.uint64(1)).astype(bool)


def address(array):
    return array.ctypes.data


def drawn(count, dtype=np.uint8):
    return RNG.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)


@pytest.mark.parametrize(("step", "dtype"), [(expand16, np.uint16), (expand8, np.uint8)])
@pytest.mark.parametrize("count", [0, 1, 31, 32])
@pytest.mark.parametrize("mask", MASKS)
def test_values_go_to_the_ones_of_the_mask(step, dtype, mask, count):
    values, out = drawn(32, dtype), np.full(33, UNTOUCHED, dtype)
    step(address(out), address(values), np.uint32(mask), np.uint32((1 << count) - 1))
    expected = np.zeros(32, dtype)
    expected[bits_of(np.uint64(mask))] = values[: mask.bit_count()]
    assert (out[:count] == expected[:count]).all() and (out[count:] == UNTOUCHED).all()


def test_fields_of_four_bits_become_bytes_the_lower_first():
    fields, out = drawn(16), np.zeros(32, np.uint8)
    split4(address(out), address(fields))
    assert (out[::2] == fields & 15).all() and (out[1::2] == fields >> 4).all()


@pytest.mark.parametrize("lanes", MASKS)
def test_coded_values_of_bf16(lanes):
    book, high, codes, escapes = drawn(3), drawn(32), drawn(8), drawn(32)
    out, code = np.zeros(32, np.uint16), codes.repeat(4) >> np.tile([0, 2, 4, 6], 8) & 3
    taken = decode_bf16(
        address(out), address(book), address(high), address(codes), 0, address(escapes), np.uint32(lanes)
    )
    escaped = (code == 3) & bits_of(np.uint64(lanes))
    exponents = np.append(book, np.uint8(0))[code].astype(np.uint16)
    exponents[escaped] = escapes[: escaped.sum()]
    wanted = high.astype(np.uint16) >> 7 << 15 | exponents << 7 | high & np.uint16(127)
    assert taken == escaped.sum() and (out == wanted).all()


@pytest.mark.parametrize("lanes", MASKS)
def test_coded_values_of_fp16(lanes):
    book, high, codes, low, escapes = drawn(3), drawn(32), drawn(16), drawn(4), drawn(32)
    out, fields = np.zeros(32, np.uint16), np.stack([codes & 15, codes >> 4], 1).reshape(-1).astype(np.uint16)
    taken = decode_fp16(*(address(each) for each in (out, book, high, codes, low, escapes)), np.uint32(lanes))
    escaped = (fields & 3 == 3) & bits_of(np.uint64(lanes))
    exponents = np.append(book, np.uint8(0))[fields & 3].astype(np.uint16)
    exponents[escaped] = escapes[: escaped.sum()]
    lowest = np.unpackbits(low, bitorder="little")
    significand = (high & np.uint16(127)) << 3 | fields >> 2 << 1 | lowest
    wanted = high.astype(np.uint16) >> 7 << 15 | (exponents & 31) << 10 | significand
    assert taken == escaped.sum() and (out == wanted).all()


@pytest.mark.parametrize("pair", [(0x1234, 0xBC00), (0x0001, 0x8001), (0x7F7F, 0x0000), (0x7F80, 0x7E01), (0, 0x8000)])
@pytest.mark.parametrize("output", [ElementFormat.FP16, ElementFormat.BF16])
def test_codes_are_scaled_rounding_the_sum_and_then_the_pattern(output, pair):
    codes, pair, mask = drawn(32), np.array(pair, np.uint16), 0x7FFFFFF5
    out = np.full(32, UNTOUCHED, np.uint16)
    step = scale_fp16 if output is ElementFormat.FP16 else scale_bf16
    step(address(out), address(codes), np.uint32(mask), np.uint32(0x3FFFFFFF), address(pair))
    scale, minimum = pair.view(np.float16).astype(np.float32) if output is ElementFormat.FP16 else bf16_values(pair)
    with np.errstate(all="ignore"):
        sums = codes.astype(np.float32) * scale + minimum
        rounded = sums.astype(np.float16).view(np.uint16) if output is ElementFormat.FP16 else bf16_patterns(sums)
    rounded = np.where(np.isnan(sums), output.number_format.canonical_nan, rounded)
    wanted = np.zeros(32, np.uint16)
    wanted[bits_of(np.uint64(mask))] = rounded[: mask.bit_count()]
    assert (out[:30] == wanted[:30]).all() and (out[30:] == UNTOUCHED).all()


def test_words_at_any_address_and_their_ones():
    data = drawn(16)
    for at in range(8):
        word = int.from_bytes(data[at : at + 8].tobytes(), "little")
        assert word_and_popcount(address(data) + at) == (word, word.bit_count())
