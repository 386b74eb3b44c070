"""Steps of 32 elements: each as numpy computes it, writing nothing beside its lanes, for every kind of processor."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.bitmap import ElementFormat
from nearflash.device.backends.host import vector
from nearflash.device.backends.host.bf16 import bf16_patterns, bf16_values
from nearflash.storage.io.direct import aligned_buffer
from nearflash.support import native

RNG = np.random.default_rng(1)
UNTOUCHED = 0x5A
MASKS = [0, 1, 0x80000000, 0xFFFFFFFF, *(int(word) for word in RNG.integers(0, 1 << 32, 8))]
LOOPS = """
#include "chunks.hpp"
using namespace nearflash;
#define EXPAND(T) store_lanes(out, expanded(values, mask), lanes, past_caches); end_stores()
extern "C" {
void expand8(uint8_t *out, const uint8_t *values, uint32_t mask, uint32_t lanes, int past_caches) { EXPAND(uint8_t); }
void expand16(uint16_t *out, const uint16_t *values, uint32_t mask, uint32_t lanes, int past_caches) {
    EXPAND(uint16_t);
}
void split(uint8_t *out, const uint8_t *fields) { split4(out, fields); }
int decode_fp16(uint16_t *out, const uint8_t *book, const uint8_t *high, const uint8_t *codes, const uint8_t *low,
                const uint8_t *escapes, uint32_t lanes) {
    return decode<true>(out, codebook(book), high, codes, low, escapes, lanes);
}
int decode_bf16(uint16_t *out, const uint8_t *book, const uint8_t *high, const uint8_t *codes, const uint8_t *low,
                const uint8_t *escapes, uint32_t lanes) {
    return decode<false>(out, codebook(book), high, codes, low, escapes, lanes);
}
void scale_fp16(uint16_t *out, const uint8_t *codes, uint32_t mask, uint32_t lanes, const uint16_t *pair) {
    scale<true>(out, codes, mask, lanes, scale_at<true>(pair), false);
}
void scale_bf16(uint16_t *out, const uint8_t *codes, uint32_t mask, uint32_t lanes, const uint16_t *pair) {
    scale<false>(out, codes, mask, lanes, scale_at<false>(pair), false);
}
}
"""
GENERIC = native.ProcessorLevel("generic", ("-O1",), frozenset())
"""Of no processor's own instructions."""


@pytest.fixture(scope="module", params=[*native.TARGETS, GENERIC], ids=lambda target: target.name)
def loops(request):
    if not request.param.features <= native._features():
        pytest.skip("this processor is another")
    flags, folders = (*native._FLAGS, *request.param.flags), (Path(vector.__file__).parent, native.INCLUDE)
    library = ctypes.CDLL(str(native.build_library("chunks", LOOPS, "tests", flags, folders=folders)))
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    for name in ("expand8", "expand16", "split", "decode_fp16", "decode_bf16", "scale_fp16", "scale_bf16"):
        getattr(library, name).restype = ctypes.c_int
    library.expand8.argtypes = library.expand16.argtypes = [pointer, pointer, word, word, ctypes.c_int]
    library.split.argtypes = [pointer, pointer]
    library.decode_fp16.argtypes = library.decode_bf16.argtypes = [*[pointer] * 6, word]
    library.scale_fp16.argtypes = library.scale_bf16.argtypes = [pointer, pointer, word, word, pointer]
    return library


def bits_of(word):
    return (word >> np.arange(32, dtype=np.uint64) & np.uint64(1)).astype(bool)


def address(array):
    return array.ctypes.data


def drawn(count, dtype=np.uint8):
    return RNG.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint8])
@pytest.mark.parametrize("count", [0, 1, 31, 32])
@pytest.mark.parametrize("mask", MASKS)
def test_values_go_to_the_ones_of_the_mask(loops, dtype, mask, count, past_caches):
    """The last one in whole lines of memory, where all lanes are written."""
    step = loops.expand16 if dtype is np.uint16 else loops.expand8
    values, out = drawn(32, dtype), aligned_buffer(33 * np.dtype(dtype).itemsize).view(dtype)[:33]
    out[:] = UNTOUCHED
    step(address(out), address(values), mask, (1 << count) - 1, past_caches)
    expected = np.zeros(32, dtype)
    expected[bits_of(np.uint64(mask))] = values[: mask.bit_count()]
    assert (out[:count] == expected[:count]).all() and (out[count:] == UNTOUCHED).all()


def test_fields_of_four_bits_become_bytes_the_lower_first(loops):
    fields, out = drawn(16), np.zeros(32, np.uint8)
    loops.split(address(out), address(fields))
    assert (out[::2] == fields & 15).all() and (out[1::2] == fields >> 4).all()


@pytest.mark.parametrize("lanes", MASKS)
def test_coded_values_of_bf16(loops, lanes):
    book, high, codes, escapes = drawn(3), drawn(32), drawn(8), drawn(32)
    out, code = np.zeros(32, np.uint16), codes.repeat(4) >> np.tile([0, 2, 4, 6], 8) & 3
    taken = loops.decode_bf16(address(out), address(book), address(high), address(codes), 0, address(escapes), lanes)
    escaped = (code == 3) & bits_of(np.uint64(lanes))
    exponents = np.append(book, np.uint8(0))[code].astype(np.uint16)
    exponents[escaped] = escapes[: escaped.sum()]
    wanted = high.astype(np.uint16) >> 7 << 15 | exponents << 7 | high & np.uint16(127)
    assert taken == escaped.sum() and (out == wanted).all()


@pytest.mark.parametrize("lanes", MASKS)
def test_coded_values_of_fp16(loops, lanes):
    book, high, codes, low, escapes = drawn(3), drawn(32), drawn(16), drawn(4), drawn(32)
    out, fields = np.zeros(32, np.uint16), np.stack([codes & 15, codes >> 4], 1).reshape(-1).astype(np.uint16)
    taken = loops.decode_fp16(*(address(each) for each in (out, book, high, codes, low, escapes)), lanes)
    escaped = (fields & 3 == 3) & bits_of(np.uint64(lanes))
    exponents = np.append(book, np.uint8(0))[fields & 3].astype(np.uint16)
    exponents[escaped] = escapes[: escaped.sum()]
    lowest = np.unpackbits(low, bitorder="little")
    significand = (high & np.uint16(127)) << 3 | fields >> 2 << 1 | lowest
    wanted = high.astype(np.uint16) >> 7 << 15 | (exponents & 31) << 10 | significand
    assert taken == escaped.sum() and (out == wanted).all()


@pytest.mark.parametrize("pair", [(0x1234, 0xBC00), (0x0001, 0x8001), (0x7F7F, 0x0000), (0x7F80, 0x7E01), (0, 0x8000)])
@pytest.mark.parametrize("output", [ElementFormat.FP16, ElementFormat.BF16])
def test_codes_are_scaled_rounding_the_sum_and_then_the_pattern(loops, output, pair):
    codes, pair, mask = drawn(32), np.array(pair, np.uint16), 0x7FFFFFF5
    out = np.full(32, UNTOUCHED, np.uint16)
    step = loops.scale_fp16 if output is ElementFormat.FP16 else loops.scale_bf16
    step(address(out), address(codes), mask, 0x3FFFFFFF, address(pair))
    scale, minimum = pair.view(np.float16).astype(np.float32) if output is ElementFormat.FP16 else bf16_values(pair)
    with np.errstate(all="ignore"):
        sums = codes.astype(np.float32) * scale + minimum
        rounded = sums.astype(np.float16).view(np.uint16) if output is ElementFormat.FP16 else bf16_patterns(sums)
    rounded = np.where(np.isnan(sums), output.number_format.canonical_nan, rounded)
    wanted = np.zeros(32, np.uint16)
    wanted[bits_of(np.uint64(mask))] = rounded[: mask.bit_count()]
    assert (out[:30] == wanted[:30]).all() and (out[30:] == UNTOUCHED).all()
