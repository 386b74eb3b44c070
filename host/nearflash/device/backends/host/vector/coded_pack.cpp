// Blocks of coded weights, packed. Called by coded_pack.py.
//
// Format: nearflash.abi.coded. What coded.cpp expands; nearflash.model.weights.levels reads the same.

#include "sections.hpp"

using namespace nearflash;

// How values are coded. ranks: of each exponent, the codes' count where it has none.
struct Coding {
    int64_t has_bitmap, code_bits, is_fp16;
    const uint8_t *ranks;
};

// Memory for a block's values, and for their ranks, twice; each of a block's elements and 64 more.
struct Scratch {
    uint16_t *values;
    uint8_t *ranks, *deeper;
};

namespace {

constexpr int WORD_FIELDS = 8;

inline uint8_t exponent_of(uint16_t word, bool is_fp16) { return is_fp16 ? word >> 10 & 31 : uint8_t(word >> 7); }

// Eight fields of a byte, the lower `bits` of each.
template <int bits> inline uint64_t joined(uint64_t fields) {
#if defined(NEARFLASH_AVX512) && defined(__BMI2__)
    return _pext_u64(fields, bits == 1 ? 0x0101010101010101 : 0x0303030303030303);
#else
    uint64_t out = 0;
    for (int field = 0; field < WORD_FIELDS; field++) out |= (fields >> 8 * field & ((1 << bits) - 1)) << bits * field;
    return out;
#endif
}

// A section of fields, bytes; those behind `count` and the padding are 0. Returns its end.
template <int bits> uint8_t *join(const uint8_t *fields, int64_t count, uint8_t *out) {
    uint8_t *const end = out + padded(count * bits);
    for (; count > 0; count -= WORD_FIELDS, fields += WORD_FIELDS, out += bits) {
        const uint64_t there = low_bits(8 * count), word = joined<bits>(load<uint64_t>(fields) & there);
        std::memcpy(out, &word, bits);
    }
    std::memset(out, 0, end - out);
    return end;
}

uint8_t *join(const uint8_t *fields, int64_t count, int64_t bits, uint8_t *out) {
    return bits == 1 ? join<1>(fields, count, out) : join<2>(fields, count, out);
}

// A section of bytes of values, by `make`. Returns its end.
template <class Make> uint8_t *put_bytes(const uint16_t *values, int64_t count, uint8_t *out, Make make) {
    for (int64_t at = 0; at < count; at++) out[at] = make(values[at]);
    std::memset(out + count, 0, padded(8 * count) - count);
    return out + padded(8 * count);
}

// The values that are not 0, and the bitmap that says which.
int64_t gather(const uint16_t *words, int64_t elements, uint16_t *values, uint8_t *bitmap) {
    int64_t count = 0;
    std::memset(bitmap, 0, padded(elements));
    for (int64_t at = 0; at < elements; at++) {
        const bool present = words[at] != 0;
        values[count] = words[at];
        bitmap[at / 8] |= present << at % 8;
        count += present;
    }
    return count;
}

// The sections of the levels, from the ranks in scratch.ranks on. Returns their end.
uint8_t *put_levels(int64_t count, int64_t code_bits, Scratch scratch, uint8_t *out) {
    for (const int64_t bits : {code_bits, int64_t(1), code_bits, int64_t(2)}) {
        const uint8_t last = (1 << bits) - 1;
        int64_t deeper = 0;
        for (int64_t at = 0; at < count; at++) {
            const uint8_t rank = scratch.ranks[at];
            scratch.deeper[deeper] = rank - last;
            deeper += rank >= last;
            scratch.ranks[at] = std::min(rank, last);
        }
        out = join(scratch.ranks, count, bits, out);
        std::swap(scratch.ranks, scratch.deeper);
        count = deeper;
    }
    return out;
}

uint8_t *put_escapes(const uint16_t *values, int64_t count, const Coding &coding, uint8_t entries, uint8_t *out) {
    uint8_t *const begin = out;
    for (int64_t at = 0; at < count; at++) {
        const uint8_t exponent = exponent_of(values[at], coding.is_fp16);
        if (coding.ranks[exponent] == entries) *out++ = exponent;
    }
    const int64_t size = out - begin;
    std::memset(out, 0, padded(8 * size) - size);
    return begin + padded(8 * size);
}

uint8_t *put_narrow(const uint16_t *values, int64_t count, uint8_t *fields, uint8_t *out) {
    for (int64_t at = 0; at < count; at++) fields[at] = values[at] & 1;
    out = join<1>(fields, count, out);
    for (int64_t at = 0; at < count; at++) fields[at] = values[at] >> 1 & 3;
    return join<2>(fields, count, out);
}

}  // namespace

extern "C" {

// How often each exponent comes; returns how many words are 0.
int64_t count_exponents(const uint16_t *words, int64_t count, bool is_fp16, int64_t *counts) {
    int64_t parts[4][256]{}, zeros = 0;
    for (int64_t at = 0; at < count; at++) parts[at % 4][exponent_of(words[at], is_fp16)]++, zeros += words[at] == 0;
    for (int exponent = 0; exponent < 256; exponent++)
        counts[exponent] = parts[0][exponent] + parts[1][exponent] + parts[2][exponent] + parts[3][exponent];
    return zeros;
}

// A block's sections; returns their bytes.
int64_t pack_block(const uint16_t *words, int64_t elements, const Coding *coding, const Scratch *scratch, uint8_t *out) {
    uint8_t *const begin = out;
    const uint16_t *values = words;
    int64_t count = elements;
    if (coding->has_bitmap) {
        count = gather(words, elements, scratch->values, out);
        values = scratch->values, out += padded(elements);
    }
    for (int64_t at = 0; at < count; at++)
        scratch->ranks[at] = coding->ranks[exponent_of(values[at], coding->is_fp16)];
    out = put_levels(count, coding->code_bits, *scratch, out);
    out = put_escapes(values, count, *coding, 2 * ((1 << coding->code_bits) - 1) + 4, out);
    if (coding->is_fp16) out = put_narrow(values, count, scratch->ranks, out);
    const int dropped = coding->is_fp16 ? 3 : 0;
    out = put_bytes(values, count, out, [=](uint16_t value) { return uint8_t(value >> 15 << 7 | (value >> dropped & 127)); });
    return out - begin;
}
}
