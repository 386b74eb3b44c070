// What Top-K leaves out, in 4 bits: read, added and packed; and the places of large numbers. Called by loops.py.
//
// Equals the torch code of residual.py to the bit: every operation rounds by itself.

#include <cmath>

#include "vectors.hpp"

using namespace nearflash;

namespace {

constexpr int BLOCK = 16, LARGEST = 7, GROUP = 32;
constexpr int32_t MAGNITUDE = 0x7FFFFFFF;

// A scale alone: by vectors.hpp, of which a lane would be used, packing takes half as long again.
inline float number_at(uint16_t bf16) {
    const uint32_t bits = uint32_t(bf16) << 16;
    return load<float>(&bits);
}

inline uint16_t bf16_of(float number) {
    const uint32_t bits = load<uint32_t>(&number);
    return uint16_t((bits + (bits >> 16 & 1) + 0x7FFF) >> 16);
}

// Which of a group's magnitudes are at least `least`, one bit each.
inline uint32_t find_in_group(const int32_t *bits, int32_t least) {
    uint32_t mask = 0;
#if defined(__AVX2__)
    const __m256i below = _mm256_set1_epi32(least - 1), magnitude = _mm256_set1_epi32(MAGNITUDE);
    for (int i = 0; i < GROUP; i += 8) {
        const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(load<__m256i>(bits + i), magnitude), below);
        mask |= uint32_t(_mm256_movemask_ps((__m256)above)) << i;
    }
#else
    for (int i = 0; i < GROUP; i++) mask |= uint32_t((bits[i] & MAGNITUDE) >= least) << i;
#endif
    return mask;
}

// The largest magnitude of a block, as an integer; the block times `inverse`, rounded, two values in a byte.
#if defined(__AVX2__)
inline int32_t find_largest(const float *block) {
    const __m256i low = load<__m256i>(block), high = load<__m256i>(block + 8), magnitude = _mm256_set1_epi32(MAGNITUDE);
    const __m256i both = _mm256_max_epi32(_mm256_and_si256(low, magnitude), _mm256_and_si256(high, magnitude));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0b01001110));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0b10110001)));
}

// Of eight numbers each pair of values, in the low byte of 64 bits.
inline __m256i pack_pairs(const float *numbers, float inverse) {
    __m256 x = _mm256_mul_ps(load<__m256>(numbers), _mm256_set1_ps(inverse));
    x = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(LARGEST)), _mm256_set1_ps(-LARGEST));
    const __m256i q = _mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(15));
    return _mm256_and_si256(_mm256_or_si256(q, _mm256_srli_epi64(q, 28)), _mm256_set1_epi64x(0xFF));
}

inline uint64_t pack_block(const float *block, float inverse) {
    __m256i bytes = _mm256_packus_epi32(pack_pairs(block, inverse), pack_pairs(block + 8, inverse));
    bytes = _mm256_packus_epi32(bytes, bytes);
    bytes = _mm256_packus_epi16(bytes, bytes);
    const uint64_t low = uint32_t(_mm256_extract_epi32(bytes, 0)), high = uint32_t(_mm256_extract_epi32(bytes, 4));
    return (low & 0xFFFF) | (high & 0xFFFF) << 16 | (low >> 16) << 32 | (high >> 16) << 48;
}
#else
inline int32_t find_largest(const float *block) {
    int32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        const int32_t magnitude = load<int32_t>(block + i) & MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

inline uint64_t pack_block(const float *block, float inverse) {
    uint64_t packed = 0;
    for (int i = 0; i < BLOCK; i++) {
        float x = block[i] * inverse;
        x = x == x ? x : 0;
        x = x < LARGEST ? x : LARGEST;
        x = x > -LARGEST ? x : -LARGEST;
        packed |= uint64_t(int32_t(__builtin_rintf(x)) & 15) << 4 * i;
    }
    return packed;
}
#endif

}  // namespace

extern "C" {

// out = numbers + q · scale, with two values of q in a byte and a bf16 scale a block.
void add_residual(const uint8_t *nibbles, const uint16_t *scales, const float *numbers, int64_t params, float *out) {
    for (int64_t first = 0; first < params; first += BLOCK) {
        const float scale = number_at(scales[first / BLOCK]);
        float residual[BLOCK];
        for (int i = 0; i < BLOCK / 2; i++) {
            const int32_t both = nibbles[first / 2 + i];
            residual[2 * i] = float(int32_t(uint32_t(both) << 28) >> 28) * scale;
            residual[2 * i + 1] = float(int32_t(uint32_t(both) << 24) >> 28) * scale;
        }
        for (int i = 0; i < BLOCK; i++) out[first + i] = residual[i] + numbers[first + i];
    }
}

// Finite numbers as values of q and scales.
void pack_residual(const float *numbers, int64_t params, uint8_t *nibbles, uint16_t *scales) {
    for (int64_t first = 0; first < params; first += BLOCK) {
        const float *const block = numbers + first;
        const int32_t most = find_largest(block);
        const uint16_t scale = bf16_of(load<float>(&most) / LARGEST);
        const uint64_t packed = pack_block(block, scale ? 1 / number_at(scale) : 0);
        std::memcpy(nibbles + first / 2, &packed, sizeof packed);
        scales[first / BLOCK] = scale;
    }
}

// Ascending places of the numbers whose magnitude, as an integer, is at least `least`, which is at least 1.
int64_t find_large(const int32_t *bits, int64_t params, int32_t least, int64_t *places) {
    int64_t count = 0, first = 0;
    for (; first + GROUP <= params; first += GROUP)
        for (uint32_t mask = find_in_group(bits + first, least); mask; mask &= mask - 1)
            places[count++] = first + __builtin_ctz(mask);
    for (; first < params; first++)
        if ((bits[first] & MAGNITUDE) >= least) places[count++] = first;
    return count;
}
}
