// Blocks of coded weights, found and expanded. Called by coded.py.
//
// Format: nearflash.abi.coded, docs/contracts/weights.md. Equals nearflash.model.weights.levels to the bit.

#include "sections.hpp"

using namespace nearflash;

// A block: where it and its group begin in the stream, its elements, and what it has of each level.
struct Block {
    int64_t begin, group, elements, values, seconds, thirds, fourths, escapes;
};

// How blocks lie in a stream.
struct Layout {
    int64_t elements, block_elements, group_blocks;
    int64_t has_bitmap, code_bits, is_fp16;
};

// Groups from `first` to before `last` that begin at offset `at` of a stream that ends at `end`.
struct Groups {
    const uint8_t *stream;
    int64_t at, end, first, last;
    Layout layout;
    Block *table;
};

// Blocks of a table, to elements that follow one another. buffer: of a block's values, and 32 more.
struct Expansion {
    const uint8_t *stream;
    const Block *table;
    int64_t blocks;
    Layout layout;
    uint16_t *out, *buffer;
};

namespace {

// The all-ones ones of so many fields of 1 or 2 bits: values that have a code of the next level.
int64_t count_deeper(const uint8_t *fields, int64_t count, int64_t bits) {
    if (bits == 2) return count_escapes(fields, count, 2);
    int64_t ones = 0;
    for (int64_t word = 0; 64 * word < count; word++)
        ones += __builtin_popcountll(load<uint64_t>(fields + 8 * word) & low_bits(count - 64 * word));
    return ones;
}

// The block at found.at, up to its end. Nothing at or behind the stream's end is read.
Fault find_block(const Groups &groups, Block &block, Found &found) {
    const Layout &layout = groups.layout;
    block.begin = found.at, block.values = block.elements;
    const auto has = [&](int64_t bits) { return found.at + padded(bits) <= groups.end; };
    if (layout.has_bitmap) {
        if (!has(block.elements)) return LENGTH;
        block.values = bitmap_ones(groups.stream + found.at, block.elements);
        found.at += padded(block.elements);
        if (block.values < 0) return COUNT;
    }
    const int64_t bits[] = {layout.code_bits, 1, layout.code_bits, 2};
    int64_t *const deeper[] = {&block.seconds, &block.thirds, &block.fourths, &block.escapes};
    int64_t count = block.values;
    for (int level = 0; level < 4; level++) {
        if (!has(count * bits[level])) return LENGTH;
        *deeper[level] = count_deeper(groups.stream + found.at, count, bits[level]);
        found.at += padded(count * bits[level]);
        count = *deeper[level];
    }
    const int64_t narrow = layout.is_fp16 ? padded(block.values) + padded(block.values * 2) : 0;
    found.at += padded(block.escapes * 8) + narrow + padded(block.values * 8);
    return found.at <= groups.end ? NONE : LENGTH;
}

// The group at found.at: its blocks in the table, and its checksum.
Fault find_group(const Groups &groups, int64_t number, Found &found) {
    const Layout &layout = groups.layout;
    const int64_t begin = found.at, first = number * layout.group_blocks;
    found.place = number;
    if (found.at + SECTION_BYTES > groups.end) return LENGTH;
    found.at += SECTION_BYTES;
    for (int64_t block = first; block < first + layout.group_blocks; block++) {
        const int64_t left = layout.elements - block * layout.block_elements;
        if (left <= 0) break;
        Block &entry = groups.table[found.parts];
        entry.group = begin, entry.elements = std::min(left, layout.block_elements);
        found.place = block;
        if (const Fault fault = find_block(groups, entry, found)) return fault;
        found.parts++;
    }
    return check_end(groups.stream, begin, groups.end, number, found);
}

// Bits of a source, the lowest first, each in the place of a one of the mask.
inline uint32_t deposited(uint32_t bits, uint32_t mask) {
#if defined(__BMI2__)
    return _pdep_u32(bits, mask);
#else
    uint32_t out = 0;
    for (; mask; mask &= mask - 1, bits >>= 1)
        if (bits & 1) out |= mask & -mask;
    return out;
#endif
}

// The lower bits of 32 fields of two bits.
inline uint32_t every_second(uint64_t fields) {
#if defined(NEARFLASH_AVX512) && defined(__BMI2__)
    return uint32_t(_pext_u64(fields, 0x5555555555555555));  // quick on all that have AVX-512
#endif
    fields &= 0x5555555555555555;
    fields = (fields | fields >> 1) & 0x3333333333333333;
    fields = (fields | fields >> 2) & 0x0F0F0F0F0F0F0F0F;
    fields = (fields | fields >> 4) & 0x00FF00FF00FF00FF;
    fields = (fields | fields >> 8) & 0x0000FFFF0000FFFF;
    return uint32_t(fields | fields >> 16);
}

// A section of fields, taken from its beginning, 32 of one or two bits at most at a time.
class Fields {
  public:
    explicit Fields(const uint8_t *section) : section(section) {}
    uint32_t ones(int count) {
        const uint64_t bits = load<uint64_t>(section + at / 8) >> at % 8;
        at += count;
        return uint32_t(bits);
    }
    uint64_t pairs(int count) {
        const int shift = at % 8;
        const uint64_t low = load<uint64_t>(section + at / 8) >> shift, high = section[at / 8 + 8];
        at += 2 * count;
        return shift ? low | high << (64 - shift) : low;
    }

  private:
    const uint8_t *section;
    int64_t at = 0;
};

// The next fields of two bits added to the lanes of a mask; returns those whose field is 3.
inline uint32_t add_pairs(U16x32 &lanes, Fields &fields, uint32_t mask) {
    const uint64_t pairs = fields.pairs(__builtin_popcount(mask));
    const uint32_t one = deposited(every_second(pairs), mask), two = deposited(every_second(pairs >> 1), mask);
    lanes += ones_of(one) + (ones_of(two) << 1);
    return one & two;
}

// Where a block's sections begin.
template <bool is_fp16, int code_bits> struct Sections {
    Sections(const uint8_t *begin, const Block &block, bool has_bitmap)
        : bitmap(begin), first(bitmap + (has_bitmap ? padded(block.elements) : 0)),
          second(first + padded(block.values * code_bits)), third(second + padded(block.seconds)),
          fourth(third + padded(block.thirds * code_bits)), escapes(fourth + padded(block.fourths * 2)),
          low(escapes + padded(block.escapes * 8)), middle(low + (is_fp16 ? padded(block.values) : 0)),
          high(middle + (is_fp16 ? padded(block.values * 2) : 0)) {}
    const uint8_t *bitmap, *first, *second, *third, *fourth, *escapes, *low, *middle, *high;
};

template <bool is_fp16, int code_bits>
void expand_block(const Expansion &x, const Block &block, uint16_t *out) {
    const Sections<is_fp16, code_bits> sections(x.stream + block.begin, block, x.layout.has_bitmap);
    constexpr int entries = 2 * ((1 << code_bits) - 1) + 4;
    U16x32 book{};
    for (int entry = 0; entry < entries; entry++) book[entry] = x.stream[block.group + entry];
    Fields second(sections.second), third(sections.third), fourth(sections.fourth);
    const uint8_t *escapes = sections.escapes;
    uint16_t *const values = x.layout.has_bitmap ? x.buffer : out;
    for (int64_t at = 0; at < block.values; at += CHUNK) {
        const uint32_t lanes = first_lanes(block.values - at);
        U16x32 entry;
        uint32_t deeper;
        if constexpr (code_bits == 2) {
            entry = spread2(sections.first + at / 4);
            deeper = mask_of(entry & entry >> 1) & lanes;
        } else {
            deeper = load<uint32_t>(sections.first + at / 8) & lanes;
            entry = ones_of(deeper);
        }
        const uint32_t in_third = deposited(second.ones(__builtin_popcount(deeper)), deeper);
        entry += ones_of(in_third);
        uint32_t in_fourth;
        if constexpr (code_bits == 2) {
            in_fourth = add_pairs(entry, third, in_third);
        } else {
            in_fourth = deposited(third.ones(__builtin_popcount(in_third)), in_third);
            entry += ones_of(in_fourth);
        }
        const uint32_t escaped = add_pairs(entry, fourth, in_fourth);
        const U16x32 exponent = looked_up(entry, book) | widen(expanded(escapes, escaped));
        escapes += __builtin_popcount(escaped);
        const U16x32 upper = widen(load<U8x32>(sections.high + at)), sign = upper >> 7 << 15;
        U16x32 value;
        if constexpr (is_fp16) {
            const U16x32 narrow = spread2(sections.middle + at / 4) << 1 | ones_of(load<uint32_t>(sections.low + at / 8));
            value = sign | (exponent & 31) << 10 | (upper & 127) << 3 | narrow;
        } else {
            value = sign | exponent << 7 | (upper & 127);
        }
        store_lanes(values + at, value, lanes);
    }
    if (x.layout.has_bitmap) spread(sections.bitmap, values, block.elements, out);
}

}  // namespace

extern "C" {

void find_groups(const Groups *groups, Found *found) { *found = find_all(*groups, find_group); }

void expand_blocks(const Expansion *x) {
    const auto expand = x->layout.is_fp16 ? (x->layout.code_bits == 2 ? expand_block<true, 2> : expand_block<true, 1>)
                                          : (x->layout.code_bits == 2 ? expand_block<false, 2> : expand_block<false, 1>);
    uint16_t *out = x->out;
    for (int64_t block = 0; block < x->blocks; block++) {
        expand(*x, x->table[block], out);
        out += x->table[block].elements;
    }
}
}
