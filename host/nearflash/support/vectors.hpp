// What the host's native loops share: vectors of GCC as wide as the processor's, and numbers of 16 bits as fp32.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nearflash {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define NEARFLASH_AVX512
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NEARFLASH_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <class T, int lanes> struct VectorOf {
    typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};
template <class T, int lanes = LANES> using Vector = typename VectorOf<T, lanes>::type;

// A processor's vector: comparisons of wider ones GCC takes apart, lane by lane.
using F32 = Vector<float>;
using I32 = Vector<int32_t>;
using U16 = Vector<uint16_t>;
using U8 = Vector<uint8_t>;

constexpr int32_t NAN_BITS = 0x7FC00000;  // the canonical one
constexpr int32_t INFINITY_BITS = 0x7F800000, MAGNITUDE_BITS = 0x7FFFFFFF;

// A value from any address, and to any.
template <class T> inline T load(const void *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> inline void store(void *to, T value) { std::memcpy(to, &value, sizeof value); }

inline F32 splat(float value) { return value - F32{}; }  // of -0, too
inline I32 splat(int32_t value) { return I32{} + value; }

// 0, 1, 2, …
inline I32 lane_numbers() {
    I32 numbers{};
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

inline I32 bits_of(F32 values) { return (I32)values; }
inline F32 number_of(I32 bits) { return (F32)bits; }

inline F32 with_one_nan(F32 x) { return x == x ? x : number_of(splat(NAN_BITS)); }

// fma: a·b + c, rounded once. fp16_values: exact; fp16_patterns: rounded to nearest even. widen: bytes or words as
// integers; words_of, bytes_of: their lower bits; any_below: whether a lane is less; round_down: to an integer, of less than
// 2^31; times_power: x·2^n of integers n from -126 to 127. (Of plain C++ GCC makes code that goes lane by lane.)
#if defined(NEARFLASH_AVX512)
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 square_root(F32 values) { return _mm512_sqrt_ps(values); }
inline F32 fp16_values(U16 patterns) { return _mm512_cvtph_ps((__m256i)patterns); }
inline U16 fp16_patterns(F32 values) { return (U16)_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }
inline I32 widen(U8 bytes) { return (I32)_mm512_cvtepu8_epi32((__m128i)bytes); }
inline I32 widen(U16 words) { return (I32)_mm512_cvtepu16_epi32((__m256i)words); }
inline U16 words_of(I32 x) { return (U16)_mm512_cvtepi32_epi16((__m512i)x); }
inline U8 bytes_of(I32 x) { return (U8)_mm512_cvtepi32_epi8((__m512i)x); }
inline bool any_below(I32 x, int32_t bound) { return _mm512_cmplt_epi32_mask((__m512i)x, _mm512_set1_epi32(bound)); }
inline F32 round_down(F32 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline F32 times_power(F32 x, F32 n) { return _mm512_scalef_ps(x, n); }
#elif defined(NEARFLASH_AVX2)
inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
inline F32 square_root(F32 values) { return _mm256_sqrt_ps(values); }
inline F32 fp16_values(U16 patterns) { return _mm256_cvtph_ps((__m128i)patterns); }
inline U16 fp16_patterns(F32 values) { return (U16)_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }
inline I32 widen(U8 bytes) { return (I32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(&bytes))); }
inline I32 widen(U16 words) { return (I32)_mm256_cvtepu16_epi32((__m128i)words); }
inline U16 words_of(I32 x) {
    const __m256i packed = _mm256_packus_epi32((__m256i)(x & 0xFFFF), _mm256_setzero_si256());
    return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}
inline U8 bytes_of(I32 x) {
    const __m128i words = (__m128i)words_of(x & 0xFF);
    return (U8)_mm_cvtsi128_si64(_mm_packus_epi16(words, words));
}
inline bool any_below(I32 x, int32_t bound) {
    const __m256i mask = (__m256i)(x < bound);
    return !_mm256_testz_si256(mask, mask);
}
#else
inline F32 fma(F32 a, F32 b, F32 c) {
    for (int lane = 0; lane < LANES; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
}
inline F32 square_root(F32 values) {
    for (int lane = 0; lane < LANES; lane++) values[lane] = __builtin_sqrtf(values[lane]);
    return values;
}
inline F32 fp16_values(U16 patterns) { return __builtin_convertvector((Vector<_Float16>)patterns, F32); }
inline U16 fp16_patterns(F32 values) { return (U16)__builtin_convertvector(values, Vector<_Float16>); }
inline I32 widen(U16 words) { return __builtin_convertvector(words, I32); }
inline I32 widen(U8 bytes) { return widen(__builtin_convertvector(bytes, U16)); }
inline U16 words_of(I32 x) { return __builtin_convertvector(x, U16); }
inline U8 bytes_of(I32 x) { return __builtin_convertvector(words_of(x), U8); }
inline bool any_below(I32 x, int32_t bound) {
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= x[lane] < bound;
    return found;
}
#endif

#if !defined(NEARFLASH_AVX512)
inline F32 round_down(F32 x) {
    const F32 whole = __builtin_convertvector(__builtin_convertvector(x, I32), F32);
    return whole > x ? whole - 1.0f : whole;
}
inline F32 times_power(F32 x, F32 n) { return x * number_of((__builtin_convertvector(n, I32) + 127) << 23); }
#endif

inline F32 bf16_values(U16 patterns) { return number_of(widen(patterns) << 16); }

// Rounded to bf16, nearest even; of NaN the canonical one alone.
inline U16 bf16_patterns(F32 values) {
    const Vector<uint32_t> bits = (Vector<uint32_t>)values;
    return words_of((I32)((bits + (bits >> 16 & 1) + 0x7FFF) >> 16));
}

}  // namespace nearflash
