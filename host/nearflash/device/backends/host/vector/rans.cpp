// Blocks of rANS-coded bytes, found, expanded and packed. Called by rans.py.
//
// Format: nearflash.abi.rans, docs/contracts/weights.md. Equals nearflash.model.weights.rans to the bit.

#include "sections.hpp"

using namespace nearflash;

// A block: where it and its group begin in the stream, its elements and its words.
struct Block {
    int64_t begin, group, elements, words;
};

// Groups from `first` to before `last` that begin at offset `at` of a stream that ends at `end`.
struct Groups {
    const uint8_t *stream;
    int64_t at, end, first, last, elements, block_elements, group_blocks;
    Block *table;
};

namespace {

constexpr int PRECISION = 13, VALUES = 256, WORD = 16;
constexpr uint32_t SLOTS = 1 << PRECISION, MOST = SLOTS / 2 - 1, LOWEST = 1 << WORD;
constexpr int64_t TABLE_BYTES = 2 * VALUES, HEAD_BYTES = 4, STATES_BYTES = 4 * CHUNK;

bool fits(const uint8_t *table) {
    uint32_t sum = 0, most = 0;
    for (int value = 0; value < VALUES; value++) {
        const uint32_t slots = load<uint16_t>(table + 2 * value);
        sum += slots, most = std::max(most, slots);
    }
    return sum == SLOTS && most <= MOST;
}

Fault find_group(const Groups &groups, int64_t number, Found &found) {
    const int64_t begin = found.at, first = number * groups.group_blocks;
    found.place = number;
    if (begin + TABLE_BYTES > groups.end) return LENGTH;
    found.place = first;
    if (!fits(groups.stream + begin)) return COUNT;
    found.at += TABLE_BYTES;
    for (int64_t block = first; block < first + groups.group_blocks; block++) {
        const int64_t left = groups.elements - block * groups.block_elements;
        if (left <= 0) break;
        found.place = block;
        if (found.at + HEAD_BYTES + STATES_BYTES > groups.end) return LENGTH;
        const int64_t words = load<uint32_t>(groups.stream + found.at);
        groups.table[found.parts] = {found.at, begin, std::min(left, groups.block_elements), words};
        found.at += padded(8 * (HEAD_BYTES + STATES_BYTES) + words * WORD);
        if (found.at > groups.end) return LENGTH;
        found.parts++;
    }
    return check_end(groups.stream, begin, groups.end, number, found);
}

// Of each slot: slots of its value (12 bits), its place among them (12), and the value (8).
void fill_slots(const uint8_t *table, uint32_t *slots) {
    for (uint32_t value = 0; value < VALUES; value++) {
        const uint32_t count = load<uint16_t>(table + 2 * value);
        for (uint32_t place = 0; place < count; place++) *slots++ = count << 20 | place << 8 | value;
    }
}

// Of all lanes the values, to `out`, and the next states, for which words are taken; how many.
#if defined(NEARFLASH_AVX512) && defined(__AVX512VBMI2__)
struct States {
    explicit States(const uint8_t *from) : low(_mm512_loadu_si512(from)), high(_mm512_loadu_si512(from + 64)) {}
    int step(const uint32_t *slots, const uint8_t *words, uint8_t *out) {
        const uint32_t needed = next(low, slots, out) | uint32_t(next(high, slots, out + 16)) << 16;
        const __m512i taken = (__m512i)expanded((const uint16_t *)words, needed);
        low = filled(low, needed, _mm512_castsi512_si256(taken));
        high = filled(high, needed >> 16, _mm512_extracti64x4_epi64(taken, 1));
        return __builtin_popcount(needed);
    }
    void save(uint32_t *to) const { _mm512_storeu_si512(to, low), _mm512_storeu_si512(to + 16, high); }

  private:
    static __mmask16 next(__m512i &state, const uint32_t *slots, uint8_t *out) {
        const __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(SLOTS - 1));
        const __m512i entry = _mm512_i32gather_epi32(slot, slots, 4);
        const __m512i place = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(MOST));
        const __m512i count = _mm512_srli_epi32(entry, 20), quotient = _mm512_srli_epi32(state, PRECISION);
        state = _mm512_add_epi32(_mm512_mullo_epi32(count, quotient), place);
        _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(entry));
        return _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(LOWEST));
    }
    static __m512i filled(__m512i state, __mmask16 needed, __m256i words) {
        const __m512i shifted = _mm512_mask_slli_epi32(state, needed, state, WORD);
        return _mm512_or_si512(shifted, _mm512_cvtepu16_epi32(words));
    }
    __m512i low, high;
};
#else
struct States {
    explicit States(const uint8_t *from) { std::memcpy(state, from, sizeof state); }
    int step(const uint32_t *slots, const uint8_t *words, uint8_t *out) {
        int taken = 0;
        for (int lane = 0; lane < CHUNK; lane++) {
            const uint32_t entry = slots[state[lane] & (SLOTS - 1)];
            const uint32_t next = (entry >> 20) * (state[lane] >> PRECISION) + (entry >> 8 & MOST);
            const uint32_t filled = next << WORD | load<uint16_t>(words + 2 * taken);
            out[lane] = uint8_t(entry);
            state[lane] = next < LOWEST ? filled : next;
            taken += next < LOWEST;
        }
        return taken;
    }
    void save(uint32_t *to) const { std::memcpy(to, state, sizeof state); }

  private:
    uint32_t state[CHUNK];
};
#endif

// A chunk reads two bytes a lane: within the stream, since the end of the group is 64 bytes behind the last words.
bool expand_block(const uint8_t *stream, const Block &block, uint8_t *out) {
    uint32_t slots[SLOTS], ends[CHUNK];
    fill_slots(stream + block.group, slots);
    const uint8_t *words = stream + block.begin + HEAD_BYTES + STATES_BYTES, *const end = words + block.words * WORD / 8;
    States states(words - STATES_BYTES);
    int64_t at = 0;
    for (; at + CHUNK <= block.elements && words <= end; at += CHUNK)
        words += states.step(slots, words, out + at) * WORD / 8;
    if (words > end) return false;
    states.save(ends);
    for (int lane = 0; at + lane < block.elements; lane++) {
        const uint32_t entry = slots[ends[lane] & (SLOTS - 1)];
        out[at + lane] = uint8_t(entry);
        ends[lane] = (entry >> 20) * (ends[lane] >> PRECISION) + (entry >> 8 & MOST);
        if (ends[lane] >= LOWEST) continue;
        if (words == end) return false;
        ends[lane] = ends[lane] << WORD | load<uint16_t>(words);
        words += WORD / 8;
    }
    return words == end && std::all_of(ends, ends + CHUNK, [](uint32_t state) { return state == LOWEST; });
}

}  // namespace

extern "C" {

void find_groups(const Groups *groups, Found *found) { *found = find_all(*groups, find_group); }

// Blocks of a table, to elements that follow one another; the number of the first that does not fit, or of blocks.
int64_t expand_blocks(const uint8_t *stream, const Block *table, int64_t blocks, uint8_t *out) {
    for (int64_t block = 0; block < blocks; block++) {
        if (!expand_block(stream, table[block], out)) return block;
        out += table[block].elements;
    }
    return blocks;
}

// How often each byte comes.
void count_bytes(const uint8_t *values, int64_t count, int64_t *counts) {
    uint32_t parts[4][VALUES];
    std::fill(counts, counts + VALUES, 0);
    for (constexpr int64_t most = 1 << 30; count > 0; values += most, count -= most) {
        std::memset(parts, 0, sizeof parts);
        for (int64_t at = 0; at < std::min(count, most); at++) parts[at % 4][values[at]]++;
        for (int value = 0; value < VALUES; value++)
            for (const auto &part : parts) counts[value] += part[value];
    }
}

// A block's states, and its words at the end of a buffer of `elements` words; returns how many. Every value has a slot.
int64_t pack_block(const uint8_t *values, int64_t elements, const uint16_t *table, uint32_t *states, uint16_t *buffer) {
    uint32_t starts[VALUES], sum = 0;
    for (int value = 0; value < VALUES; value++) starts[value] = sum, sum += table[value];
    std::fill(states, states + CHUNK, LOWEST);
    uint16_t *word = buffer + elements;
    for (int64_t at = elements - 1; at >= 0; at--) {
        const uint32_t slots = table[values[at]];
        uint32_t state = states[at % CHUNK];
        if (state >> (2 * WORD - PRECISION) >= slots) *--word = uint16_t(state), state >>= WORD;
        states[at % CHUNK] = (state / slots << PRECISION) + state % slots + starts[values[at]];
    }
    return buffer + elements - word;
}
}
