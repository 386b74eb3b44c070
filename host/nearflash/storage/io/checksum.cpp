// CRC32C of any bytes, behind those whose CRC32C is `before`. Called by checksum.py.

#include "crc32c.hpp"

using namespace nearflash;

extern "C" uint32_t crc32c(const uint8_t *data, int64_t bytes, uint32_t before) {
    const int64_t whole = bytes & ~int64_t{7};
    uint32_t value = ~Checksum<InstructionStep>::of(data, whole, ~before);
    for (const uint8_t *at = data + whole; at < data + bytes; at++)
        value = value >> 8 ^ MOVE_ONE[0][(value ^ *at) & 0xFF];
    return ~value;
}
