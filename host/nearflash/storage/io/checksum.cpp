// CRC32C of any bytes, behind those whose CRC32C is `before`: by the processor's instructions where it has them; by a
// table. Called by checksum.py.

#include <cstring>

#include "crc32c.hpp"

using namespace nearflash;

namespace {

template <class Step> uint32_t sum(const uint8_t *data, int64_t bytes, uint32_t before) {
    const int64_t whole = bytes & ~int64_t{7};
    uint32_t value = ~Checksum<Step>::of(data, whole, ~before);
    for (const uint8_t *at = data + whole; at < data + bytes; at++)
        value = value >> 8 ^ MOVE_ONE[0][(value ^ *at) & 0xFF];
    return ~value;
}

// One part of rows: that of row n begins n·stride behind `data`.
struct Part {
    const uint8_t *data;
    int64_t stride, bytes;
};

}  // namespace

extern "C" {

uint32_t crc32c(const uint8_t *data, int64_t bytes, uint32_t before) { return sum<InstructionStep>(data, bytes, before); }

// The CRC32C of each of `count` blocks goes where that of the bytes before it lies. Where there are targets, a block whose
// CRC32C is the expected one is copied to its target, if it has one.
void crc32c_each(const uint8_t *const *blocks, const int64_t *bytes, uint32_t *values, int64_t count,
                 const uint32_t *expected, uint8_t *const *targets) {
    for (int64_t n = 0; n < count; n++) {
        values[n] = crc32c(blocks[n], bytes[n], values[n]);
        if (targets && targets[n] && values[n] == expected[n]) memcpy(targets[n], blocks[n], bytes[n]);
    }
}

// The CRC32C of each row, whose parts follow one another; of row chosen[n] where rows are chosen.
void crc32c_rows(const Part *parts, int64_t part_count, const int64_t *chosen, int64_t count, uint32_t *values) {
    for (int64_t n = 0; n < count; n++) {
        const int64_t row = chosen ? chosen[n] : n;
        values[n] = 0;
        for (const Part *part = parts; part < parts + part_count; part++)
            values[n] = crc32c(part->data + row * part->stride, part->bytes, values[n]);
    }
}

uint32_t crc32c_by_table(const uint8_t *data, int64_t bytes, uint32_t before) {
    return sum<TableStep>(data, bytes, before);
}
}
