// Compare old words with new ones and write what changed, tile by tile (nearflash.abi.delta), and read it again; read
// Top-K streams, whose tiles are the same but never dense. Called by delta.py and topk.py.

#include <algorithm>

#include "crc32c.hpp"

using namespace nearflash;

// `count` words of a tensor, from parameter `first` of a delta on.
struct Piece {
    int64_t first;
    uint16_t *words;
    int64_t count;
};

namespace {

constexpr int TILE = 4096, GROUP = 32, DENSE_ABOVE = 4;

uint8_t *pad(uint8_t *at, const uint8_t *section) {
    while ((at - section) % 8) *at++ = 0;
    return at;
}

// Which of a group's words differ, one bit each.
template <class T> inline uint32_t find_differing(const T *old, const T *now, int size) {
    uint32_t mask = 0;
    for (int i = 0; i < size; i++) mask |= uint32_t(old[i] != now[i]) << i;
    return mask;
}

#if defined(__AVX2__)
inline __m256i same_words(const uint16_t *old, const uint16_t *now) {
    return _mm256_cmpeq_epi16(load<__m256i>(old), load<__m256i>(now));
}
inline uint32_t find_differing(const uint16_t *old, const uint16_t *now) {
    const __m256i packed = _mm256_packs_epi16(same_words(old, now), same_words(old + 16, now + 16));
    return ~uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(packed, 0b11011000)));
}
inline uint32_t find_differing(const uint32_t *old, const uint32_t *now) {
    uint32_t mask = 0;
    for (int i = 0; i < GROUP; i += 8) {
        const __m256i same = _mm256_cmpeq_epi32(load<__m256i>(old + i), load<__m256i>(now + i));
        mask |= (~uint32_t(_mm256_movemask_ps((__m256)same)) & 0xFF) << i;
    }
    return mask;
}
#else
template <class T> inline uint32_t find_differing(const T *old, const T *now) {
    return find_differing(old, now, GROUP);
}
#endif

// Local indices of the words that differ, ascending, until there are so many that the tile is dense.
template <class T> int find_changes(const T *old, const T *now, int params, uint16_t *local) {
    int count = 0;
    for (int first = 0; first < params && count * DENSE_ABOVE <= params; first += GROUP) {
        const int size = params - first < GROUP ? params - first : GROUP;
        uint32_t mask = size == GROUP ? find_differing(old + first, now + first)
                                      : find_differing(old + first, now + first, size);
        for (; mask; mask &= mask - 1) local[count++] = uint16_t(first + __builtin_ctz(mask));
    }
    return count;
}

uint32_t crc_of_tile(int64_t tile, uint64_t head, const uint8_t *sections, int64_t bytes) {
    const uint32_t before = InstructionStep::step(~0u, uint64_t(tile) | head << 32);
    return Checksum<InstructionStep>::of(sections, bytes, before);
}

template <class T>
int64_t write_delta(const T *old, const T *now, int64_t params, int64_t tile, uint8_t *out, int64_t *words) {
    uint8_t *at = out;
    *words = 0;
    uint16_t local[TILE];
    for (int64_t first = 0; first < params; first += TILE, tile++) {
        const int size = int(params - first < TILE ? params - first : TILE);
        const int changed = find_changes(old + first, now + first, size, local);
        const bool dense = changed * DENSE_ABOVE > size;
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
        const uint64_t word = head | uint64_t(crc_of_tile(tile, head, start + 8, at - start - 8)) << 32;
        std::memcpy(start, &word, 8);
        *words += dense ? size : changed;
    }
    return at - out;
}

enum Fault : int64_t { NONE, LENGTH = 2, COUNT, CHECKSUM, ORDER, RANGE };  // nearflash.abi.topk.StreamFault

// Where a delta's tiles end, or the first fault is: its tile, and of this the count and the flags, or the last index.
struct Walk {
    int64_t fault, tile, count, detail, at, words;
    uint32_t heads_crc;
};

// `count` ascending 16-bit indices below `params`: the fault, with the last one as its detail.
Fault check_indices(const uint8_t *at, int64_t count, int64_t params, int64_t &last) {
    bool ascend = true;
    last = -1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = load<uint16_t>(at + 2 * i);
        ascend &= index > last;
        last = index;
    }
    return !ascend ? ORDER : last >= params ? RANGE : NONE;
}

// Check the tiles of `params` words of T from `at` on, and call visit(first, count, indices, values) for each one:
// indices are null where it is dense, as one with flags is not unless the stream has those.
template <class T, bool has_flags = true, class Visit>
Walk walk_tiles(const uint8_t *delta, int64_t at, int64_t size, int64_t params, Visit visit) {
    Walk walk{NONE, 0, 0, 0, at, 0, ~0u};
    const auto stop = [&](Fault fault) { return walk.fault = fault, walk; };
    for (int64_t first = 0; first < params; first += TILE, walk.tile++) {
        const int64_t here = params - first < TILE ? params - first : TILE;
        if (walk.at + 8 > size) return stop(LENGTH);
        const uint64_t head = load<uint64_t>(delta + walk.at);
        walk.count = head & 0xFFFF, walk.detail = has_flags ? head >> 16 & 0xFFFF : 0;
        const bool dense = walk.detail;
        if (walk.count > here || walk.detail > 1 || (dense && walk.count != here)) return stop(COUNT);
        const uint8_t *const indices = delta + walk.at + 8;
        const int64_t index_bytes = dense ? 0 : (2 * walk.count + 7) / 8 * 8;
        const int64_t bytes = index_bytes + (int64_t(sizeof(T)) * walk.count + 7) / 8 * 8;
        if (bytes > size - walk.at - 8) return stop(LENGTH);
        if (crc_of_tile(walk.tile, head & 0xFFFFFFFF, indices, bytes) != head >> 32) return stop(CHECKSUM);
        if (!dense)
            if (const Fault fault = check_indices(indices, walk.count, here, walk.detail)) return stop(fault);
        visit(first, walk.count, dense ? nullptr : indices, indices + index_bytes);
        walk.heads_crc = InstructionStep::step(walk.heads_crc, head);
        walk.words += walk.count;
        walk.at += 8 + bytes;
    }
    walk.heads_crc = ~walk.heads_crc;
    return walk;
}

// Indices and words of the first `room` changes.
template <class T>
Walk read_changes(const uint8_t *delta, int64_t at, int64_t size, int64_t params, int64_t room, int64_t *indices,
                  T *words) {
    int64_t found = 0;
    const auto take = [&](int64_t first, int64_t count, const uint8_t *local, const uint8_t *values) {
        const int64_t taken = count < room - found ? count : room - found;
        for (int64_t i = 0; i < taken; i++) indices[found + i] = first + (local ? load<uint16_t>(local + 2 * i) : i);
        std::memcpy(words + found, values, taken * sizeof(T));
        found += taken;
    };
    return walk_tiles<T>(delta, at, size, params, take);
}

// Numbers of `params` parameters, 0 where a stream has no pair. widen: makes a number of a value.
template <class T, class Widen>
Walk expand(const uint8_t *stream, int64_t at, int64_t size, int64_t params, float *out, Widen widen) {
    std::fill(out, out + params, 0.0f);
    const auto put = [&](int64_t first, int64_t count, const uint8_t *local, const uint8_t *values) {
        for (int64_t i = 0; i < count; i++)
            out[first + load<uint16_t>(local + 2 * i)] = widen(load<T>(values + sizeof(T) * i));
    };
    return walk_tiles<T, false>(stream, at, size, params, put);
}

}  // namespace

extern "C" {

// The gradients of a Top-K stream whose tiles begin at `at`; where that is faulty they are of no use. value_format: of
// nearflash.abi.topk.ValueFormat.
void expand_stream(const uint8_t *stream, int64_t at, int64_t size, int64_t params, int32_t value_format, float *out,
                   Walk *walk) {
    const auto of_bits = [](uint32_t bits) { return load<float>(&bits); };
    const auto of_fp16 = [](uint16_t bits) { return fp16_values(U16{} + bits)[0]; };
    const auto of_bf16 = [&](uint16_t bits) { return of_bits(uint32_t(bits) << 16); };
    *walk = value_format == 0   ? expand<uint32_t>(stream, at, size, params, out, of_bits)
            : value_format == 1 ? expand<uint16_t>(stream, at, size, params, out, of_fp16)
                                : expand<uint16_t>(stream, at, size, params, out, of_bf16);
}

// The words of the pieces, ascending and apart, become those after a delta whose tiles begin at `at`, but for those in
// no piece; where that is faulty they are of no use.
void apply_delta16(const uint8_t *delta, int64_t at, int64_t size, int64_t params, const Piece *pieces, int64_t count,
                   Walk *walk) {
    const Piece *piece = pieces, *const end = pieces + count;
    const auto put_dense = [&](int64_t first, int64_t stop, const uint8_t *values) {
        for (const Piece *here = piece; here < end && here->first < stop; here++) {
            const int64_t from = std::max(first, here->first), to = std::min(stop, here->first + here->count);
            if (from < to) std::memcpy(here->words + from - here->first, values + 2 * (from - first), 2 * (to - from));
        }
    };
    const auto put = [&](int64_t first, int64_t changed, const uint8_t *local, const uint8_t *values) {
        while (piece < end && piece->first + piece->count <= first) piece++;
        if (!local) return put_dense(first, first + changed, values);
        const Piece *here = piece;
        for (int64_t i = 0; i < changed; i++) {
            const int64_t index = first + load<uint16_t>(local + 2 * i);
            while (here < end && here->first + here->count <= index) here++;
            if (here < end && index >= here->first) here->words[index - here->first] = load<uint16_t>(values + 2 * i);
        }
    };
    *walk = walk_tiles<uint16_t>(delta, at, size, params, put);
}

// The changes of a delta whose tiles begin at `at`: room for those that its header states.
void read_changes16(const uint8_t *delta, int64_t at, int64_t size, int64_t params, int64_t room, int64_t *indices,
                    uint16_t *words, Walk *walk) {
    *walk = read_changes(delta, at, size, params, room, indices, words);
}
void read_changes32(const uint8_t *delta, int64_t at, int64_t size, int64_t params, int64_t room, int64_t *indices,
                    uint32_t *words, Walk *walk) {
    *walk = read_changes(delta, at, size, params, room, indices, words);
}

// Bytes of the tiles, the first with number `tile`, that are written to `out`, which has room for all of them dense;
// `words` gets the values' number.
int64_t write_delta16(const uint16_t *old, const uint16_t *now, int64_t params, int64_t tile, uint8_t *out,
                      int64_t *words) {
    return write_delta(old, now, params, tile, out, words);
}
int64_t write_delta32(const uint32_t *old, const uint32_t *now, int64_t params, int64_t tile, uint8_t *out,
                      int64_t *words) {
    return write_delta(old, now, params, tile, out, words);
}

// Low-precision copies, fp16 or bf16, as update.cpp makes them.
void round_words(const float *numbers, int64_t params, int32_t is_fp16, uint16_t *out) {
    const auto round = [&](F32 x) { return is_fp16 ? fp16_patterns(with_one_nan(x)) : bf16_patterns(with_one_nan(x)); };
    const int64_t whole = params / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, round(load<F32>(numbers + i)));
    for (int64_t i = whole; i < params; i++) out[i] = round(splat(numbers[i]))[0];
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
