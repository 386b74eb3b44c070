// Passes over tensors in host memory: sums of squares, fingerprints, copies. Called by norm.py and host_memory.py.
//
// A fingerprint is the sum of words, each times the key of its place in its run of 1,024, times an odd number of the
// run, mod 2^64 (nearflash.training.step.fingerprint).

#include <algorithm>

#include "vectors.hpp"

using namespace nearflash;

// Words to copy to `target`, or to nowhere where it is null; `first` is the place of the first in its tensor.
struct Words {
    const uint32_t *source;
    uint32_t *target;
    int64_t count, first;
};

namespace {

constexpr int RUN = 1024, EIGHTH = RUN / 8, WIDE_LANES = LANES / 2;

using F64 = Vector<double, WIDE_LANES>;
using U32 = Vector<uint32_t>;
using U64 = Vector<uint64_t, WIDE_LANES>;

// Squares of WIDE_LANES numbers. (GCC would take conversions to the double of a vector's width apart.)
#if defined(NEARFLASH_AVX512)
inline F64 doubles_at(const float *x) { return _mm512_cvtps_pd(load<__m256>(x)); }
inline F64 doubles_at(const uint16_t *x) {
    return _mm512_cvtps_pd((__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(x)), 16));
}
#elif defined(NEARFLASH_AVX2)
inline F64 doubles_at(const float *x) { return _mm256_cvtps_pd(load<__m128>(x)); }
inline F64 doubles_at(const uint16_t *x) {
    return _mm256_cvtps_pd((__m128)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)x)), 16));
}
#else
inline F64 doubles_at(const float *x) { return __builtin_convertvector(load<Vector<float, WIDE_LANES>>(x), F64); }
inline F64 doubles_at(const uint16_t *x) {
    F64 wide{};
    for (int lane = 0; lane < WIDE_LANES; lane++) wide[lane] = bf16_values(U16{x[lane]})[0];
    return wide;
}
#endif

template <class T> inline F64 squares_at(const T *x) {
    const F64 wide = doubles_at(x);
    return wide * wide;
}

// Of LANES numbers.
inline U32 words_at(const uint32_t *x) { return load<U32>(x); }
inline U32 words_at(const float *x) { return load<U32>(x); }
inline U32 words_at(const uint16_t *x) { return (U32)widen(load<U16>(x)); }

// Products of 32 bits by 32, added two by two.
inline U64 products(U32 x, U32 y) {
    __asm__("" : "+x"(y));  // GCC would load it twice, once for each half: loads are what this waits for
    const U64 x_high = (U64)x >> 32, y_high = (U64)y >> 32;
#if defined(NEARFLASH_AVX512)
    return (U64)_mm512_mul_epu32((__m512i)x, (__m512i)y) + (U64)_mm512_mul_epu32((__m512i)x_high, (__m512i)y_high);
#elif defined(NEARFLASH_AVX2)
    return (U64)_mm256_mul_epu32((__m256i)x, (__m256i)y) + (U64)_mm256_mul_epu32((__m256i)x_high, (__m256i)y_high);
#else
    return ((U64)x & 0xFFFFFFFF) * ((U64)y & 0xFFFFFFFF) + x_high * y_high;
#endif
}

inline uint64_t sum_of(U64 x) {
    uint64_t sum = 0;
    for (int lane = 0; lane < WIDE_LANES; lane++) sum += x[lane];
    return sum;
}

inline uint64_t factor_of(int64_t run) { return 2 * uint64_t(run) + 1; }

// The first half plus the second, until one is left; the first three halvings are done at once, in registers.
template <class T> double sum_of_squares(const T *x) {
    constexpr int vectors = EIGHTH / WIDE_LANES;
    F64 part[vectors];
    for (int i = 0; i < vectors; i++) {
        const auto at = [&](int place) { return squares_at(x + place * EIGHTH + i * WIDE_LANES); };
        part[i] = ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
    }
#pragma GCC unroll 5
    for (int half = vectors / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < half; i++) part[i] += part[half + i];
    double last[WIDE_LANES];
    store(last, part[0]);
    for (int half = WIDE_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) last[i] += last[half + i];
    return last[0];
}

template <class T>
uint64_t sum_runs(const T *values, int64_t count, const uint32_t *keys, int64_t first_run, double *sums) {
    uint64_t mark = 0;
    for (int64_t run = 0; run * RUN < count; run++) {
        const T *x = values + run * RUN;
        T padded[RUN];
        if (const int64_t rest = count - run * RUN; rest < RUN) {
            std::fill_n(std::copy_n(x, rest, padded), RUN - rest, T(0));
            x = padded;
        }
        sums[run] = sum_of_squares(x);
        if (!keys) continue;
        U64 words{};
        for (int i = 0; i < RUN; i += LANES) words += products(words_at(x + i), words_at(keys + i));
        mark += sum_of(words) * factor_of(first_run + run);
    }
    return mark;
}

template <bool copies> uint64_t sum_words(const Words &words, const uint32_t *keys) {
    uint64_t total = 0;
    for (int64_t place = 0; place < words.count;) {
        const int64_t run = (words.first + place) / RUN, phase = (words.first + place) % RUN;
        const int64_t length = std::min(RUN - phase, words.count - place), whole = length / LANES * LANES;
        const uint32_t *const x = words.source + place, *const key = keys + phase;
        uint32_t *const out = words.target + place;
        U64 sums{};
        for (int64_t i = 0; i < whole; i += LANES) {
            const U32 some = words_at(x + i);
            if (copies) store(out + i, some);
            sums += products(some, words_at(key + i));
        }
        uint64_t part = sum_of(sums);
        for (int64_t i = whole; i < length; i++) {
            const uint32_t word = x[i];
            if (copies) out[i] = word;
            part += uint64_t(word) * key[i];
        }
        total += part * factor_of(run);
        place += length;
    }
    return total;
}

}  // namespace

extern "C" {

// Sums of squares of each run of `count` numbers, the last one filled with zeros; the fingerprint of the numbers where
// there are keys, else 0. The runs' numbers begin at first_run.
uint64_t sum_floats(const float *x, int64_t count, const uint32_t *keys, int64_t first_run, double *sums) {
    return sum_runs(x, count, keys, first_run, sums);
}
uint64_t sum_bf16s(const uint16_t *x, int64_t count, const uint32_t *keys, int64_t first_run, double *sums) {
    return sum_runs(x, count, keys, first_run, sums);
}

// For each of the tables' rows its part of a fingerprint, and its copy.
void copy_all_words(const Words *table, int64_t rows, const uint32_t *keys, uint64_t *sums) {
    for (int64_t row = 0; row < rows; row++) sums[row] = table[row].target ? sum_words<true>(table[row], keys) : sum_words<false>(table[row], keys);
}

void widen_bf16s(const uint16_t *source, int64_t count, uint32_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = uint32_t(source[i]) << 16;
}
}
