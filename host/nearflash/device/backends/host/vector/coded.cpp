// Blocks of coded weights, found and expanded. Called by coded.py.
//
// Format: nearflash.abi.coded, docs/contracts/weights.md. Equals nearflash.model.weights.levels to the bit.

#include "bytes.hpp"
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

// Blocks of a table, to elements that follow one another. buffer: of a block's values, and 64 more.
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
void expand_block(const Expansion &x, const Block &block, uint16_t *out, bool past_caches) {
    const Sections<is_fp16, code_bits> sections(x.stream + block.begin, block, x.layout.has_bitmap);
    constexpr int entries = 2 * ((1 << code_bits) - 1) + 4;
    uint8_t book[16]{};
    std::memcpy(book, x.stream + block.group, entries);
    Fields second(sections.second), third(sections.third), fourth(sections.fourth);
    const uint8_t *escapes = sections.escapes;
    uint16_t *const values = x.layout.has_bitmap ? x.buffer : out;
    for (int64_t at = 0; at < block.values; at += VALUES) {
        const uint64_t lanes = low_bits(std::min<int64_t>(block.values - at, VALUES));
        Bytes entry;
        uint64_t in_second, in_fourth;
        if constexpr (code_bits == 2) {
            entry = pairs_at(sections.first + at / 4, 0);
            in_second = equal(entry, 3) & lanes;
        } else {
            in_second = load<uint64_t>(sections.first + at / 8) & lanes;
            entry = flags(in_second);
        }
        const uint64_t in_third = second.ones(in_second);
        entry += flags(in_third);
        if constexpr (code_bits == 2) {
            const Bytes code = third.pairs(in_third);
            in_fourth = equal(code, 3);
            entry += code;
        } else {
            in_fourth = third.ones(in_third);
            entry += flags(in_fourth);
        }
        const Bytes code = fourth.pairs(in_fourth);
        const uint64_t escaped = equal(code, 3);
        const Bytes exponent = looked_up(Bytes(entry + code), book) | dealt(load<Bytes>(escapes), escaped);
        escapes += __builtin_popcountll(escaped);
        const Bytes high = load<Bytes>(sections.high + at);
        Bytes lower, upper;
        if constexpr (is_fp16) {
            lower = high << 3 | pairs_at(sections.middle + at / 4, 0) << 1 | flags(load<uint64_t>(sections.low + at / 8));
            upper = (high & 128) | (exponent & 31) << 2 | (high >> 5 & 3);
        } else {
            lower = exponent << 7 | (high & 127);
            upper = (high & 128) | exponent >> 1;
        }
        store_joined(values + at, lower, upper, lanes, past_caches && !x.layout.has_bitmap);
    }
    if (x.layout.has_bitmap) spread(sections.bitmap, values, block.elements, out, past_caches);
}

}  // namespace

extern "C" {

void find_groups(const Groups *groups, Found *found) { *found = find_all(*groups, find_group); }

void expand_blocks(const Expansion *x) {
    const auto expand = x->layout.is_fp16 ? (x->layout.code_bits == 2 ? expand_block<true, 2> : expand_block<true, 1>)
                                          : (x->layout.code_bits == 2 ? expand_block<false, 2> : expand_block<false, 1>);
    const bool past_caches = x->blocks * x->layout.block_elements * int64_t(sizeof *x->out) > CACHED_BYTES;
    uint16_t *out = x->out;
    for (int64_t block = 0; block < x->blocks; block++) {
        expand(*x, x->table[block], out, past_caches);
        out += x->table[block].elements;
    }
    end_stores();
}
}
