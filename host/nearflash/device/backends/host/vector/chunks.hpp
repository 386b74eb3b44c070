// What the loops over rows of a bitmap matrix are made of: 32 elements at once, between addresses in memory.
//
// What lies there must be checked before. `lanes` and `mask` have a bit an element; no lane is written but `lanes`.

#pragma once

#include "vectors.hpp"

namespace nearflash {

constexpr int CHUNK = 32;
constexpr uint32_t ALL = 0xFFFFFFFF;

using U8x32 = Vector<uint8_t, CHUNK>;
using U16x32 = Vector<uint16_t, CHUNK>;

// expanded: values that follow one another in memory, each in the lane of its one of the mask; 0 elsewhere.
// store_lanes: those of `lanes`, which are the first ones; 0 for one that is not present. Words go past the caches where
// that is asked for and a whole line of memory is written: the line is not read before, a third of what memory moves.
// mask_of: the lanes that are not 0. ones_of: 1 in the lanes of a mask. looked_up: entries of a table, by codes below 32.
// end_stores: before another thread may read. spread4, spread2: 32 fields of so many bits, the lowest first.
#if defined(NEARFLASH_AVX512) && defined(__AVX512VBMI2__)
inline U8x32 expanded(const uint8_t *values, uint32_t mask) {
    return (U8x32)_mm256_maskz_expandloadu_epi8(mask, values);
}
inline U16x32 expanded(const uint16_t *values, uint32_t mask) {
    return (U16x32)_mm512_maskz_expandloadu_epi16(mask, values);
}
inline void store_lanes(uint8_t *out, U8x32 values, uint32_t lanes, bool) {
    _mm256_mask_storeu_epi8(out, lanes, (__m256i)values);
}
inline void store_lanes(uint16_t *out, U16x32 values, uint32_t lanes, bool past_caches) {
    if (past_caches && lanes == ALL && uintptr_t(out) % sizeof values == 0)
        _mm512_stream_si512((__m512i *)out, (__m512i)values);
    else
        _mm512_mask_storeu_epi16(out, lanes, (__m512i)values);
}
inline void end_stores() { _mm_sfence(); }
inline uint32_t mask_of(U16x32 x) { return _mm512_test_epi16_mask((__m512i)x, (__m512i)x); }
inline U16x32 ones_of(uint32_t mask) { return (U16x32)_mm512_maskz_set1_epi16(mask, 1); }
inline void store_lanes(uint16_t *out, const U16 (&parts)[CHUNK / LANES], uint32_t present, uint32_t lanes,
                        bool past_caches) {
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)parts[0]), (__m256i)parts[1], 1);
    store_lanes(out, (U16x32)all & -ones_of(present), lanes, past_caches);
}
inline U16x32 widen(U8x32 bytes) { return (U16x32)_mm512_cvtepu8_epi16((__m256i)bytes); }
inline U16x32 spread4(const uint8_t *packed) {
    const auto wide = (Vector<uint32_t, 16>)_mm512_cvtepu8_epi32(load<__m128i>(packed));
    return (U16x32)((wide | wide << 12) & 0x000F000F);
}
inline U16x32 spread2(const uint8_t *packed) {
    const auto wide = (Vector<uint64_t, 8>)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)packed));
    return (U16x32)((wide | wide << 14 | wide << 28 | wide << 42) & 0x0003000300030003);
}
inline U16x32 looked_up(U16x32 codes, U16x32 table) {
    return (U16x32)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table);
}
#else
template <class T> inline Vector<T, CHUNK> expanded(const T *values, uint32_t mask) {
    if (mask == ALL) return load<Vector<T, CHUNK>>(values);
    T lanes[CHUNK]{};
    for (; mask; mask &= mask - 1) lanes[__builtin_ctz(mask)] = load<T>(values++);
    return load<Vector<T, CHUNK>>(lanes);
}
template <class T> inline void store_lanes(T *out, Vector<T, CHUNK> values, uint32_t lanes, bool) {
    if (lanes == ALL) return store(out, values);
    std::memcpy(out, &values, __builtin_popcount(lanes) * sizeof *out);
}
inline uint32_t mask_of(U16x32 x) {
    uint32_t mask = 0;
    for (int lane = 0; lane < CHUNK; lane++) mask |= uint32_t(x[lane] != 0) << lane;
    return mask;
}
inline U16x32 ones_of(uint32_t mask) {
    using Half = Vector<uint16_t, 16>;
    constexpr Half bits{1, 2, 4, 8, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13,
                        1 << 14, 1 << 15};
    const Half halves[] = {(uint16_t(mask) & bits) == bits, (uint16_t(mask >> 16) & bits) == bits};
    return load<U16x32>(halves) & 1;
}
inline U16x32 widen(U8x32 bytes) { return __builtin_convertvector(bytes, U16x32); }
template <int bits> inline U16x32 spread_fields(const uint8_t *packed) {
    U16x32 fields{};
    for (int lane = 0; lane < CHUNK; lane++) fields[lane] = packed[lane * bits / 8] >> lane * bits % 8 & ((1 << bits) - 1);
    return fields;
}
inline U16x32 spread4(const uint8_t *packed) { return spread_fields<4>(packed); }
inline U16x32 spread2(const uint8_t *packed) { return spread_fields<2>(packed); }
inline U16x32 looked_up(U16x32 codes, U16x32 table) {
    for (int lane = 0; lane < CHUNK; lane++) codes[lane] = table[codes[lane]];
    return codes;
}
inline void store_lanes(uint16_t *out, const U16 (&parts)[CHUNK / LANES], uint32_t present, uint32_t lanes,
                        bool past_caches) {
    const U16x32 values = load<U16x32>(parts);
    store_lanes(out, present == ALL ? values : values & -ones_of(present), lanes, past_caches);
}
inline void end_stores() {}
#endif

// 32 fields of 4 bits as bytes, the lower one first.
inline void split4(uint8_t *out, const uint8_t *fields) {
    const auto packed = __builtin_convertvector(load<Vector<uint8_t, 16>>(fields), Vector<uint16_t, 16>);
    store(out, (packed | packed << 4) & 0x0F0F);
}

// The exponents of a codebook, and 0 for an escape.
inline U16x32 codebook(const uint8_t *book) { return U16x32{book[0], book[1], book[2]}; }

// 32 coded values as words; returns how many of `lanes` took an escape. `low` counts for fp16 alone.
template <bool is_fp16>
inline int decode(uint16_t *out, U16x32 book, const uint8_t *high, const uint8_t *codes, const uint8_t *low,
                  const uint8_t *escapes, uint32_t lanes) {
    const U16x32 fields = is_fp16 ? spread4(codes) : spread2(codes), code = fields & 3;
    const uint32_t escaped = mask_of(code & code >> 1) & lanes;
    const U16x32 exponent = looked_up(code, book) | widen(expanded(escapes, escaped));
    const U16x32 upper = widen(load<U8x32>(high)), sign = upper >> 7 << 15;
    if constexpr (is_fp16) {
        const U16x32 significand = (upper & 127) << 3 | fields >> 2 << 1 | ones_of(load<uint32_t>(low));
        store(out, sign | (exponent & 31) << 10 | significand);
    } else {
        store(out, sign | exponent << 7 | (upper & 127));
    }
    return __builtin_popcount(escaped);
}

// The scale and the minimum of a group of columns.
struct Scale {
    F32 factor, minimum;
};

template <bool is_fp16> inline Scale scale_at(const uint16_t *pair) {
    const U16 factor = U16{} + load<uint16_t>(pair), minimum = U16{} + load<uint16_t>(pair + 1);
    if constexpr (is_fp16) return {fp16_values(factor), fp16_values(minimum)};
    return {bf16_values(factor), bf16_values(minimum)};
}

// Codes, bytes, as code · factor + minimum, each to the lane of its one of the mask; 0 elsewhere.
template <bool is_fp16>
inline void scale(uint16_t *out, const uint8_t *codes, uint32_t mask, uint32_t lanes, const Scale &by, bool past_caches) {
    uint8_t spread[CHUNK];
    U16 rounded[CHUNK / LANES];
    store(spread, expanded(codes, mask));
    for (int part = 0; part < CHUNK / LANES; part++) {
        const F32 steps = __builtin_convertvector(widen(load<U8>(spread + part * LANES)), F32);
        const F32 total = with_one_nan(steps * by.factor + by.minimum);
        rounded[part] = is_fp16 ? fp16_patterns(total) : bf16_patterns(total);
    }
    store_lanes(out, rounded, mask, lanes, past_caches);
}

}  // namespace nearflash
