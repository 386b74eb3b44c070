// CRC32C. Three parts of a block are summed at once, as the processor's instruction takes three cycles and the next can
// begin after one; a sum is moved behind the bytes of the parts after it by tables, as that is linear. Where carry-less
// products of wide vectors are there, long data is folded by them first: one stream, at the rate of memory.
//
// Source: Gopal et al., Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction (Intel, 2011); Gopal et al.,
// Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel, 2009).

#pragma once

#include <array>

#include "vectors.hpp"
#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace nearflash {

using Table = std::array<std::array<uint32_t, 256>, 4>;

// By each byte of a register, what it becomes behind one byte of zeros.
inline Table move_one() {
    Table table{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0x82F63B78 : 0);
        table[0][byte] = value;
        for (int place = 1; place < 4; place++) table[place][byte] = byte << 8 * (place - 1);
    }
    return table;
}

inline uint32_t moved(const Table &table, uint32_t value) {
    return table[0][value & 0xFF] ^ table[1][value >> 8 & 0xFF] ^ table[2][value >> 16 & 0xFF] ^ table[3][value >> 24];
}

// Behind `bytes` bytes of zeros, a power of two.
inline Table move_by(int64_t bytes) {
    Table table = move_one();
    for (; bytes > 1; bytes /= 2) {
        Table twice;
        for (int place = 0; place < 4; place++)
            for (int byte = 0; byte < 256; byte++) twice[place][byte] = moved(table, table[place][byte]);
        table = twice;
    }
    return table;
}

inline const Table MOVE_ONE = move_one();

// The register after eight bytes.
struct TableStep {
    static constexpr bool folds = false;
    static uint32_t step(uint32_t value, uint64_t word) {
        for (int place = 0; place < 8; place++) value = value >> 8 ^ MOVE_ONE[0][(value ^ word >> 8 * place) & 0xFF];
        return value;
    }
};

struct InstructionStep {
    static constexpr bool folds = true;
    static uint32_t step(uint32_t value, uint64_t word) {
#if defined(__SSE4_2__)
        return uint32_t(_mm_crc32_u64(value, word));
#elif defined(__ARM_FEATURE_CRC32)
        return __crc32cd(value, word);
#else
        return TableStep::step(value, word);
#endif
    }
};

#if defined(NEARFLASH_AVX512) && defined(__VPCLMULQDQ__)
#define NEARFLASH_FOLDS
constexpr int64_t VECTOR_BYTES = 64;

// What a half of 16 bytes is multiplied by to go in front of so many bytes: x^(8·bytes - 1), as a product of reflected
// polynomials is short of a factor x.
inline uint64_t power(int64_t bytes) {
    uint32_t value = 1 << 24;
    for (; bytes > 1; bytes--) value = value >> 8 ^ MOVE_ONE[0][value & 0xFF];
    return uint64_t(value) << 32;
}

inline __m512i powers(int64_t bytes) { return _mm512_broadcast_i64x2(_mm_set_epi64x(power(bytes), power(bytes + 8))); }

// 16 bytes in each quarter, moved in front of what `by` is for, onto `next`.
inline __m512i folded(__m512i value, __m512i by, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00), _mm512_clmulepi64_epi128(value, by, 0x11),
                                     next, 0x96);
}

// The register behind all whole vectors of `at`, eight of them at least.
inline uint32_t fold(uint32_t value, const uint8_t *&at, const uint8_t *end) {
    static const __m512i by_four = powers(4 * VECTOR_BYTES), by_one = powers(VECTOR_BYTES), by_quarter = powers(16);
    const auto vector = [&](int number) { return load<__m512i>(at + number * VECTOR_BYTES); };
    __m512i sums[4];
    for (int k = 0; k < 4; k++) sums[k] = vector(k);
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int32_t(value))));
    for (at += 4 * VECTOR_BYTES; end - at >= 4 * VECTOR_BYTES; at += 4 * VECTOR_BYTES)
        for (int k = 0; k < 4; k++) sums[k] = folded(sums[k], by_four, vector(k));
    for (int k = 1; k < 4; k++) sums[0] = folded(sums[0], by_one, sums[k]);
    for (; end - at >= VECTOR_BYTES; at += VECTOR_BYTES) sums[0] = folded(sums[0], by_one, vector(0));
    uint64_t parts[8];
    store(parts, sums[0]);
    for (int part = 2; part < 8; part += 2) {
        const __m512i before = _mm512_zextsi128_si512(load<__m128i>(parts + part - 2));
        const __m512i next = _mm512_zextsi128_si512(load<__m128i>(parts + part));
        store(parts + part, _mm512_castsi512_si128(folded(before, by_quarter, next)));
    }
    return uint32_t(_mm_crc32_u64(_mm_crc32_u64(0, parts[6]), parts[7]));
}
#endif

template <class Step> struct Checksum {
    // All whole blocks of three parts.
    template <int64_t part_bytes> static uint32_t blocks(uint32_t value, const uint8_t *&at, const uint8_t *end) {
        static const Table one = move_by(part_bytes), two = move_by(2 * part_bytes);
        for (; end - at >= 3 * part_bytes; at += 3 * part_bytes) {
            uint32_t second = 0, third = 0;
            for (const uint8_t *word = at; word < at + part_bytes; word += 8) {
                value = Step::step(value, load<uint64_t>(word));
                second = Step::step(second, load<uint64_t>(word + part_bytes));
                third = Step::step(third, load<uint64_t>(word + 2 * part_bytes));
            }
            value = moved(two, value) ^ moved(one, second) ^ third;
        }
        return value;
    }

    // Of so many bytes, a multiple of 8, behind those that `value` is the register after. Long parts, as what comes from
    // memory comes faster; then short ones.
    static uint32_t of(const uint8_t *at, int64_t bytes, uint32_t value = 0xFFFFFFFF) {
        const uint8_t *const end = at + bytes;
#if defined(NEARFLASH_FOLDS)
        if (Step::folds && bytes >= 8 * VECTOR_BYTES) value = fold(value, at, end);
#endif
        value = blocks<8192>(value, at, end);
        value = blocks<256>(value, at, end);
        for (; at < end; at += 8) value = Step::step(value, load<uint64_t>(at));
        return ~value;
    }
};

}  // namespace nearflash
