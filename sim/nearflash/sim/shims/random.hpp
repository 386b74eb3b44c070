// A small seeded generator for stalls (splitmix64: every seed is good, one multiply-xor chain a number).
#pragma once
#include <cstdint>

struct Random {
    uint64_t state;

    uint32_t next32() {
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return static_cast<uint32_t>(z >> 32);
    }
};
