// CRC32C. Three parts of a block are summed at once, as the processor's instruction takes three cycles and the next can
// begin after one; a sum is moved behind the bytes of the parts after it by tables, as that is linear.
//
// Source: Gopal et al., Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction (Intel, 2011).

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
    static uint32_t step(uint32_t value, uint64_t word) {
        for (int place = 0; place < 8; place++) value = value >> 8 ^ MOVE_ONE[0][(value ^ word >> 8 * place) & 0xFF];
        return value;
    }
};

struct InstructionStep {
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
        value = blocks<8192>(value, at, end);
        value = blocks<256>(value, at, end);
        for (; at < end; at += 8) value = Step::step(value, load<uint64_t>(at));
        return ~value;
    }
};

}  // namespace nearflash
