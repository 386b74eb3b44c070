// Compare old words with new ones, and write what changed, tile by tile (nearflash.abi.delta). Called by delta.py.

#include "crc32c.hpp"

using namespace nearflash;

namespace {

constexpr int TILE = 4096, GROUP = 32;

uint8_t *pad(uint8_t *at, const uint8_t *section) {
    while ((at - section) % 8) *at++ = 0;
    return at;
}

// Local indices of the words that differ, ascending; most groups of a step's words have none.
template <class T> int find_changes(const T *old, const T *now, int params, uint16_t *local) {
    int count = 0;
    for (int first = 0; first < params; first += GROUP) {
        const int size = params - first < GROUP ? params - first : GROUP;
        if (size == GROUP) {
            T any = 0;
            for (int i = 0; i < GROUP; i++) any |= old[first + i] ^ now[first + i];
            if (!any) continue;
        }
        for (int i = first; i < first + size; i++) {
            local[count] = uint16_t(i);
            count += old[i] != now[i];
        }
    }
    return count;
}

template <class T> int64_t write_delta(const T *old, const T *now, int64_t params, uint8_t *out, int64_t *words) {
    uint8_t *at = out;
    *words = 0;
    uint16_t local[TILE + 1];
    for (int64_t first = 0, tile = 0; first < params; first += TILE, tile++) {
        const int size = int(params - first < TILE ? params - first : TILE);
        const int changed = find_changes(old + first, now + first, size, local);
        const bool dense = changed * 4 > size;
        const uint64_t head = dense ? uint64_t(size) | 1 << 16 : uint64_t(changed);
        uint8_t *const start = at;
        at += 8;
        if (dense) {
            std::memcpy(at, now + first, size * sizeof(T));
            at += size * sizeof(T);
        } else {
            std::memcpy(at, local, 2 * changed);
            at = pad(at + 2 * changed, start);
            for (int i = 0; i < changed; i++, at += sizeof(T)) std::memcpy(at, now + first + local[i], sizeof(T));
        }
        at = pad(at, start);
        const uint32_t before = InstructionStep::step(~0u, uint64_t(tile) | head << 32);
        const uint64_t crc = Checksum<InstructionStep>::of(start + 8, at - start - 8, before);
        const uint64_t word = head | crc << 32;
        std::memcpy(start, &word, 8);
        *words += dense ? size : changed;
    }
    return at - out;
}

}  // namespace

extern "C" {

// Bytes of the tiles that are written to `out`, which has room for all of them dense; `words` gets the values' number.
int64_t write_delta16(const uint16_t *old, const uint16_t *now, int64_t params, uint8_t *out, int64_t *words) {
    return write_delta(old, now, params, out, words);
}
int64_t write_delta32(const uint32_t *old, const uint32_t *now, int64_t params, uint8_t *out, int64_t *words) {
    return write_delta(old, now, params, out, words);
}

// CRC32C over the words of all tiles, from the tiles that write_delta wrote.
uint32_t crc_of_heads(const uint8_t *tiles, int64_t count, int64_t value_bytes) {
    uint32_t crc = ~0u;
    for (int64_t tile = 0; tile < count; tile++) {
        const uint64_t head = load<uint64_t>(tiles);
        const int64_t values = head & 0xFFFF, indices = head >> 16 & 0xFFFF ? 0 : values;
        crc = InstructionStep::step(crc, head);
        tiles += 8 + (2 * indices + 7) / 8 * 8 + (value_bytes * values + 7) / 8 * 8;
    }
    return ~crc;
}
}
