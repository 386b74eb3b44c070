// What the loop over values coded in levels is made of: 64 or 32 of them at once, a byte each.
//
// What lies in memory must be checked before; 64 bytes more can be read behind it. Masks have a bit a value.

#pragma once

#include "chunks.hpp"

namespace nearflash {

// pairs_at: fields of two bits from bit `shift`, an even one below 8, on. dealt: the first bytes, each in the lane of its
// one of the mask; 0 elsewhere. equal: the lanes of a value. flags: 1 in the lanes of a mask. looked_up: entries of a
// table of 16. store_joined: words of lower and upper bytes, those of `lanes`. deposited: bits, the lowest first, each in
// the place of a one.
#if defined(NEARFLASH_AVX512) && defined(__AVX512VBMI2__) && defined(__AVX512VBMI__)
constexpr int VALUES = 64;
using Bytes = Vector<uint8_t, VALUES>;

inline Bytes pairs_at(const uint8_t *from, int shift) {
    constexpr Vector<uint64_t, 8> places{0x020100, 0x040302, 0x060504, 0x080706, 0x0A0908, 0x0C0B0A, 0x0E0D0C, 0x100F0E};
    const __m512i eights = _mm512_permutexvar_epi8((__m512i)places, _mm512_castsi256_si512(load<__m256i>(from)));
    const __m512i bits = _mm512_add_epi8(_mm512_set1_epi64(0x0E0C0A0806040200), _mm512_set1_epi8(char(shift)));
    return (Bytes)_mm512_multishift_epi64_epi8(bits, eights) & 3;
}
inline Bytes dealt(Bytes bytes, uint64_t mask) { return (Bytes)_mm512_maskz_expand_epi8(mask, (__m512i)bytes); }
inline uint64_t equal(Bytes bytes, uint8_t value) {
    return _mm512_cmpeq_epi8_mask((__m512i)bytes, _mm512_set1_epi8(char(value)));
}
inline Bytes flags(uint64_t mask) { return (Bytes)_mm512_maskz_set1_epi8(mask, 1); }
inline Bytes looked_up(Bytes places, const uint8_t (&table)[16]) {
    return (Bytes)_mm512_permutexvar_epi8((__m512i)places, _mm512_castsi128_si512(load<__m128i>(table)));
}
inline void store_joined(uint16_t *out, Bytes lower, Bytes upper, uint64_t lanes, bool past_caches) {
    const auto half = [&](auto extract) {
        const __m512i low = _mm512_cvtepu8_epi16(extract((__m512i)lower)), high = _mm512_cvtepu8_epi16(extract((__m512i)upper));
        return (U16x32)low | (U16x32)high << 8;
    };
    store_lanes(out, half([](__m512i x) { return _mm512_castsi512_si256(x); }), uint32_t(lanes), past_caches);
    store_lanes(out + CHUNK, half([](__m512i x) { return _mm512_extracti64x4_epi64(x, 1); }), uint32_t(lanes >> CHUNK),
                past_caches);
}
#else
constexpr int VALUES = 32;
using Bytes = Vector<uint8_t, VALUES>;

inline Bytes pairs_at(const uint8_t *from, int shift) {
    using Quads = Vector<uint32_t, VALUES / 4>;
    const uint64_t fields = load<uint64_t>(from) >> shift | uint64_t(from[8]) << 1 << (63 - shift);
    const Quads wide = __builtin_convertvector(load<Vector<uint8_t, VALUES / 4>>(&fields), Quads);
    return (Bytes)((wide | wide << 6 | wide << 12 | wide << 18) & 0x03030303);
}
inline Bytes dealt(Bytes bytes, uint64_t mask) {
    const uint8_t *next = (const uint8_t *)&bytes;
#if defined(__BMI2__)
    uint64_t lanes[VALUES / 8];
    for (int eighth = 0; eighth < VALUES / 8; eighth++, mask >>= 8) {
        lanes[eighth] = _pdep_u64(load<uint64_t>(next), _pdep_u64(mask, 0x0101010101010101) * 255);
        next += __builtin_popcount(mask & 255);
    }
#else
    uint8_t lanes[VALUES]{};
    for (; mask; mask &= mask - 1) lanes[__builtin_ctzll(mask)] = *next++;
#endif
    return load<Bytes>(lanes);
}
#if defined(NEARFLASH_AVX2)
inline uint64_t equal(Bytes bytes, uint8_t value) {
    return uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8((__m256i)bytes, _mm256_set1_epi8(char(value)))));
}
inline Bytes flags(uint64_t mask) {
    const __m256i places = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bits = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(mask)), places);
    return (Bytes)_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits) & 1;
}
inline Bytes looked_up(Bytes places, const uint8_t (&table)[16]) {
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)places);
}
#else
inline uint64_t equal(Bytes bytes, uint8_t value) {
    uint64_t mask = 0;
    for (int lane = 0; lane < VALUES; lane++) mask |= uint64_t(bytes[lane] == value) << lane;
    return mask;
}
inline Bytes flags(uint64_t mask) {
    Bytes lanes{};
    for (int lane = 0; lane < VALUES; lane++) lanes[lane] = mask >> lane & 1;
    return lanes;
}
inline Bytes looked_up(Bytes places, const uint8_t (&table)[16]) {
    for (int lane = 0; lane < VALUES; lane++) places[lane] = table[places[lane]];
    return places;
}
#endif
inline void store_joined(uint16_t *out, Bytes lower, Bytes upper, uint64_t lanes, bool past_caches) {
    store_lanes(out, U16x32(widen(lower) | widen(upper) << 8), uint32_t(lanes), past_caches);
}
#endif

inline uint64_t deposited(uint64_t bits, uint64_t mask) {
#if defined(__BMI2__)
    return _pdep_u64(bits, mask);
#else
    uint64_t out = 0;
    for (; mask; mask &= mask - 1, bits >>= 1)
        if (bits & 1) out |= mask & -mask;
    return out;
#endif
}

// A section of fields of one or two bits, taken from its beginning, those of a mask's ones at a time.
class Fields {
  public:
    explicit Fields(const uint8_t *section) : section(section) {}
    uint64_t ones(uint64_t mask) {
        const int shift = at % 8;
        const uint64_t low = load<uint64_t>(section + at / 8) >> shift, high = section[at / 8 + 8];
        at += __builtin_popcountll(mask);
        return deposited(low | high << 1 << (63 - shift), mask);
    }
    Bytes pairs(uint64_t mask) {
        const Bytes next = pairs_at(section + at / 8, at % 8);
        at += 2 * __builtin_popcountll(mask);
        return dealt(next, mask);
    }

  private:
    const uint8_t *section;
    int64_t at = 0;
};

}  // namespace nearflash
