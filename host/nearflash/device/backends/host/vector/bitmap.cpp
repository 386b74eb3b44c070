// Rows of a bitmap matrix, found and expanded; CRC32C. Called by rows.py and checksum.py.
//
// Format: nearflash.abi.bitmap, docs/contracts/weights.md. Equals nearflash.model.weights.bitmap to the bit.

#include "crc32c.hpp"
#include "sections.hpp"

using namespace nearflash;

enum RowFormat : int32_t { PLAIN16, PLAIN8, CODED_FP16, CODED_BF16, SCALED8, SCALED4 };

// Where a row's sections begin in the stream, in bytes, and how long they are.
struct Row {
    int64_t bitmap, values, escapes, group;
};

// Groups from `first` to before `last` that begin at offset `at` of a stream that ends at `end`.
struct Groups {
    const uint8_t *stream;
    int64_t at, end;
    int64_t first, last;
    int64_t rows, columns, group_rows, book_bytes;
    int64_t section_bits[6];  // of a field of each Section, 0 where the format lacks it
    Row *table;
};

// Rows of a table as dense ones, `row_bytes` apart, of which the columns are written.
struct Expansion {
    const uint8_t *stream;
    const Row *table;
    int64_t rows, columns;
    uint8_t *out;
    int64_t row_bytes;
    uint8_t *buffer;  // 2·columns + 64 bytes
};

// Matrices of codes without a bitmap: 64 more bytes can be read behind the last code.
struct Codes {
    const uint16_t *pairs;
    const uint8_t *codes;
    int64_t rows, columns, bits;
    uint16_t *out;
};

namespace {

constexpr int64_t SCALE_COLUMNS = 64;
constexpr int64_t AHEAD_BYTES = 8192;  // where a row begins is known when the one before it is counted: too late to load it

// The row at found.at, up to its end. Nothing at or behind the stream's end is read.
Fault find_row(const Groups &groups, Row &row, Found &found) {
    enum { SCALES = 1, LOW, CODES, ESCAPES, VALUES };
    row.bitmap = found.at;
    if (found.at + padded(groups.columns) > groups.end) return LENGTH;
    const int64_t values = bitmap_ones(groups.stream + found.at, groups.columns);
    found.at += padded(groups.columns);
    if (values < 0) return COUNT;
    row.values = values, row.escapes = 0;
    for (int section = SCALES; section <= VALUES; section++) {
        const int64_t bits = groups.section_bits[section];
        int64_t fields = values;
        if (section == SCALES) fields = (groups.columns + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
        if (section == ESCAPES) fields = row.escapes;
        if (found.at + padded(fields * bits) > groups.end) return LENGTH;
        if (section == CODES && bits) row.escapes = count_escapes(groups.stream + found.at, values, bits);
        found.at += padded(fields * bits);
    }
    for (int64_t at = row.bitmap; at < found.at; at += SECTION_BYTES)
        __builtin_prefetch(groups.stream + std::min(at + AHEAD_BYTES, groups.end - 1));
    return NONE;
}

// The group at found.at: its rows in the table, and its checksum.
Fault find_group(const Groups &groups, int64_t number, Found &found) {
    const int64_t begin = found.at;
    found.place = number;
    if (found.at + groups.book_bytes > groups.end) return LENGTH;
    found.at += groups.book_bytes;
    const int64_t last = std::min((number + 1) * groups.group_rows, groups.rows);
    for (int64_t number_of_row = number * groups.group_rows; number_of_row < last; number_of_row++) {
        Row &row = groups.table[found.parts];
        row.group = begin;
        found.place = number_of_row;
        if (const Fault fault = find_row(groups, row, found)) return fault;
        found.parts++;
    }
    return check_end(groups.stream, begin, groups.end, number, found);
}

template <class T> void expand_plain(const Expansion &x, const Row &row, uint8_t *out, bool past_caches) {
    const uint8_t *const bitmap = x.stream + row.bitmap;
    spread(bitmap, (const T *)(bitmap + padded(x.columns)), x.columns, (T *)out, past_caches);
}

template <bool is_fp16> void expand_coded(const Expansion &x, const Row &row, uint8_t *out, bool past_caches) {
    const uint8_t *const bitmap = x.stream + row.bitmap;
    const U16x32 book = codebook(x.stream + row.group);
    constexpr int code_bits = is_fp16 ? 4 : 2;
    const uint8_t *const low = bitmap + padded(x.columns), *const codes = low + (is_fp16 ? padded(row.values) : 0);
    const uint8_t *escapes = codes + padded(row.values * code_bits), *const high = escapes + padded(row.escapes * 8);
    uint16_t *const values = (uint16_t *)x.buffer;
    for (int64_t first = 0; first < row.values; first += CHUNK)
        escapes += decode<is_fp16>(values + first, book, high + first, codes + first * code_bits / 8, low + first / 8,
                                   escapes, first_lanes(row.values - first));
    spread(bitmap, values, x.columns, (uint16_t *)out, past_caches);
}

template <bool is_fp16, int bits> void expand_scaled(const Expansion &x, const Row &row, uint8_t *out, bool past_caches) {
    const uint8_t *const bitmap = x.stream + row.bitmap;
    const uint16_t *const pairs = (const uint16_t *)(bitmap + padded(x.columns));
    const uint8_t *codes = (const uint8_t *)pairs + padded((x.columns + SCALE_COLUMNS - 1) / SCALE_COLUMNS * 32);
    if constexpr (bits == 4) {
        for (int64_t first = 0; first < row.values; first += CHUNK) split4(x.buffer + first, codes + first / 2);
        codes = x.buffer;
    }
    for_chunks(bitmap, x.columns, [&](int64_t first, uint32_t mask, uint32_t lanes) {
        const Scale by = scale_at<is_fp16>(pairs + first / SCALE_COLUMNS * 2);
        scale<is_fp16>((uint16_t *)out + first, codes, mask, lanes, by, past_caches);
        codes += __builtin_popcount(mask);
    });
}

using ExpandRow = void (*)(const Expansion &, const Row &, uint8_t *, bool);

ExpandRow expansion_of(RowFormat format, bool is_fp16) {
    switch (format) {
        case PLAIN16: return expand_plain<uint16_t>;
        case PLAIN8: return expand_plain<uint8_t>;
        case CODED_FP16: return expand_coded<true>;
        case CODED_BF16: return expand_coded<false>;
        case SCALED8: return is_fp16 ? expand_scaled<true, 8> : expand_scaled<false, 8>;
        case SCALED4: return is_fp16 ? expand_scaled<true, 4> : expand_scaled<false, 4>;
    }
    __builtin_unreachable();
}

template <bool is_fp16, int bits> void expand_every(const Codes &x) {
    const int64_t row_bytes = (x.columns * bits + 7) / 8, row_pairs = (x.columns + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
    const bool past_caches = x.rows * x.columns * int64_t(sizeof *x.out) > CACHED_BYTES;
    for (int64_t row = 0; row < x.rows; row++) {
        for (int64_t first = 0; first < x.columns; first += CHUNK) {
            const uint16_t *const pair = x.pairs + 2 * (row * row_pairs + first / SCALE_COLUMNS);
            const uint8_t *codes = x.codes + row * row_bytes + first * bits / 8;
            uint8_t bytes[CHUNK];
            if constexpr (bits == 4) split4(bytes, codes), codes = bytes;
            uint16_t *const out = x.out + row * x.columns + first;
            scale<is_fp16>(out, codes, ALL, first_lanes(x.columns - first), scale_at<is_fp16>(pair), past_caches);
        }
    }
    end_stores();
}

}  // namespace

extern "C" {

void find_groups(const Groups *groups, Found *found) { *found = find_all(*groups, find_group); }

void expand_rows(const Expansion *x, int32_t format, int32_t is_fp16) {
    const ExpandRow expand_row = expansion_of(RowFormat(format), is_fp16);
    const bool past_caches = x->rows * x->row_bytes > CACHED_BYTES;
    for (int64_t row = 0; row < x->rows; row++)
        expand_row(*x, x->table[row], x->out + row * x->row_bytes, past_caches);
    end_stores();
}

void expand_codes(const Codes *x, int32_t is_fp16) {
    if (x->bits == 4) return is_fp16 ? expand_every<true, 4>(*x) : expand_every<false, 4>(*x);
    return is_fp16 ? expand_every<true, 8>(*x) : expand_every<false, 8>(*x);
}
}
