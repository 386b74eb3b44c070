// Sections of compressed weights: padded to 64 bytes, counted, and spread by a bitmap. Included by bitmap.cpp, coded.cpp.

#pragma once

#include <algorithm>

#include "chunks.hpp"
#include "crc32c.hpp"

namespace nearflash {

enum Fault : int32_t { NONE, LENGTH = 2, COUNT, CHECKSUM };  // nearflash.abi.topk.StreamFault

constexpr int64_t SECTION_BYTES = 64;
constexpr int64_t CACHED_BYTES = 1 << 19;  // of dense output at once, that the caches are to hold for who reads it next

// What became of groups: `place` is the row or block of the fault, or its group where it is in none of these; parts are
// the rows or blocks found, `at` where the groups end.
struct Found {
    int64_t fault, place, parts, at;
};

// Bytes of a section of so many bits.
inline int64_t padded(int64_t bits) { return (bits + 8 * SECTION_BYTES - 1) / (8 * SECTION_BYTES) * SECTION_BYTES; }

inline uint32_t first_lanes(int64_t count) { return count >= CHUNK ? ALL : (uint32_t(1) << count) - 1; }

inline uint64_t low_bits(int64_t count) { return count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1; }

// Ones of a row's bitmap; -1 where there are some behind its columns.
inline int64_t bitmap_ones(const uint8_t *bitmap, int64_t columns) {
    int64_t count = 0;
    uint64_t beyond = 0;
    for (int64_t word = 0; word < padded(columns) / 8; word++) {
        const uint64_t bits = load<uint64_t>(bitmap + 8 * word);
        count += __builtin_popcountll(bits);
        beyond |= bits & ~low_bits(std::max<int64_t>(columns - 64 * word, 0));
    }
    return beyond ? -1 : count;
}

// Codes of 3 among the values'.
inline int64_t count_escapes(const uint8_t *codes, int64_t values, int64_t code_bits) {
    const uint64_t first = code_bits == 2 ? 0x5555555555555555 : 0x1111111111111111;
    int64_t count = 0;
    for (int64_t word = 0; 64 * word < values * code_bits; word++) {
        const uint64_t bits = load<uint64_t>(codes + 8 * word) & low_bits(values * code_bits - 64 * word);
        count += __builtin_popcountll(bits & bits >> 1 & first);
    }
    return count;
}

// The end of a group that begins at `begin`, of a stream that ends at `end`: its number, and the checksum up to found.at.
inline Fault check_end(const uint8_t *stream, int64_t begin, int64_t end, int64_t number, Found &found) {
    found.place = number;
    if (found.at + SECTION_BYTES > end) return LENGTH;
    const uint64_t checksum = Checksum<InstructionStep>::of(stream + begin, found.at - begin);
    if (load<uint64_t>(stream + found.at) != (uint64_t(number) | checksum << 32)) return CHECKSUM;
    found.at += SECTION_BYTES;
    return NONE;
}

// All groups from groups.first to before groups.last, up to the first fault.
template <class Groups> inline Found find_all(const Groups &groups, Fault (*find)(const Groups &, int64_t, Found &)) {
    Found found{NONE, 0, 0, groups.at};
    for (int64_t number = groups.first; number < groups.last && !found.fault; number++)
        found.fault = find(groups, number, found);
    if (!found.fault) found.place = 0;
    return found;
}

// Calls with the place, the mask and the written lanes of each 32 columns of a row.
template <class Call> inline void for_chunks(const uint8_t *bitmap, int64_t columns, Call call) {
    for (int64_t first = 0; first < columns; first += 2 * CHUNK) {
        const uint64_t word = load<uint64_t>(bitmap + first / 8);
        const int64_t left = columns - first;
        call(first, uint32_t(word), first_lanes(left));
        call(first + CHUNK, uint32_t(word >> CHUNK), first_lanes(std::max<int64_t>(left - CHUNK, 0)));
    }
}

// A row from its bitmap and its values.
template <class T>
inline void spread(const uint8_t *bitmap, const T *values, int64_t columns, T *out, bool past_caches) {
    for_chunks(bitmap, columns, [&](int64_t first, uint32_t mask, uint32_t lanes) {
        store_lanes(out + first, expanded(values, mask), lanes, past_caches);
        values += __builtin_popcount(mask);
    });
}

}  // namespace nearflash
