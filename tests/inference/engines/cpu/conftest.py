"""The loops of attention.cpp one by one, for every target that this processor is."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from nearflash.inference.engines.cpu import kernels
from nearflash.support import native

LOOPS = """
#include "attention.cpp"
extern "C" {
int lanes() { return LANES; }
int taken_at_once(int64_t left) { return heads_at_once(left); }
void exponential(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(out + i, exp_of(load<F32>(x + i)));
}
float product(const float *x, const uint16_t *y, int64_t n) { return dot_half(x, y, n); }
float largest(const float *x, int64_t n, float lower) { return find_largest(x, n, lower); }
float exponentials(float *x, int64_t n, float factor, float most) { return sum_exponentials<true>(x, n, factor, most); }
float only_sum(float *x, int64_t n, float factor, float most) { return sum_exponentials<false>(x, n, factor, most); }
void sums_of_entries(const float *x, int64_t each, float factor, float most, float *out) {
    store(out, sum_entries(x, each / LANES, factor, most));
}
void scaled(float factor, float *x, int64_t n) { scale(factor, x, n); }
void rows(int many, int bits, int heads, const uint8_t *codes, int64_t length, const int64_t *rows, int64_t dims,
          const float *weights, const float *base, float *scores, int64_t width) {
    const IndexRows index{codes, length, dims, int64_t(1) << 40, rows};  // what is fetched need not be there
    with_heads(heads, [&](auto count) {
        const auto score = [&](auto form) {
            many ? score_rows<form, count, SUMS>(index, codes, weights, base, scores, width)
                 : score_rows<form, count, loaded<form>>(index, codes, weights, base, scores, width);
        };
        if (bits == 4) score(std::integral_constant<int, 4>());
        if (bits == 8) score(std::integral_constant<int, 8>());
        if (bits == 16) score(std::integral_constant<int, 16>());
    });
}
void products(int few, int heads, const float *q, int64_t padded, const uint16_t *keys, int64_t stride, float *logits,
              int64_t width) {
    with_heads(heads, [&](auto count) {
        const auto multiply = few ? few_dots<count> : dots<count>;
        multiply(q, padded, keys, stride, logits, width);
    });
}
void added(int heads, int parts, const float *weights, int64_t width, const uint16_t *values, int64_t stride,
           int64_t count, float *out, int64_t between) {
    with_heads(heads, [&](auto some) {
        if (parts == 1) add_values<some, 1>(weights, width, values, stride, count, out, between);
        if (parts == 2) add_values<some, 2>(weights, width, values, stride, count, out, between);
        if (parts == 4) add_values<some, 4>(weights, width, values, stride, count, out, between);
    });
}
void index_scores(const Index *index, const float *q, int64_t group, int64_t dims, float *scores, int64_t width) {
    score_index(*index, 0, q, group, dims, scores, width);
}
void suffix_scores(const float *q, int64_t group, int64_t dim, const uint16_t *keys, int64_t count, int64_t first,
                   float *scores, int64_t width) {
    score_keys(q, group, dim, keys, count, first, scores, width);
}
void weighed(const Choice *choice, float *scores, int64_t tokens, const float *factors, float *keys, float *shares) {
    weigh(*choice, scores, tokens, factors, keys, shares);
}
void chosen(const Choice *choice, int64_t tokens, const float *keys, const float *shares, uint8_t *taken,
            float *alpha) {
    choose(*choice, tokens, keys, shares, taken, alpha);
}
}
"""
#: Kinds of the arguments of each: p array, l int64, i int, f float.
KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
ARGUMENTS = {
    "lanes": "", "taken_at_once": "l", "exponential": "ppl", "product": "ppl", "largest": "plf", "exponentials": "plff",
    "only_sum": "plff", "sums_of_entries": "plffp", "scaled": "fpl", "rows": "iiiplplpppl", "products": "iiplplpl",
    "added": "iiplpllpl", "index_scores": "ppllpl", "suffix_scores": "pllpllpl", "weighed": "pplppp",
    "chosen": "plpppp",
}  # fmt: skip
RETURN_FLOATS = ("product", "largest", "exponentials", "only_sum")
GENERIC = native.ProcessorLevel("generic", ("-O1",), frozenset())
"""Of no processor's own instructions."""


class Loops:
    """The functions of LOOPS; arrays are passed as they are."""

    def __init__(self, target):
        folders = Path(kernels.__file__).parent, native.INCLUDE
        flags = (*native._FLAGS, *target.flags)
        self._library = ctypes.CDLL(str(native.build_library("attention", LOOPS, "tests", flags, folders=folders)))
        for name, kinds in ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes = [KINDS[kind] for kind in kinds]
            function.restype = ctypes.c_float if name in RETURN_FLOATS else ctypes.c_int
        self.lanes = self._library.lanes()

    def __getattr__(self, name):
        def call(*arguments):
            return getattr(self._library, name)(
                *(native.find_address(x) if isinstance(x, np.ndarray) else x for x in arguments)
            )

        return call


_MARKS = {"x86-64-v3": pytest.mark.full}


@pytest.fixture(
    scope="session",
    params=[pytest.param(one, marks=_MARKS.get(one.name, ()), id=one.name) for one in (*native.TARGETS, GENERIC)],
)
def loops(request):
    if not request.param.features <= native._features():
        pytest.skip("this processor is another")
    return Loops(request.param)
