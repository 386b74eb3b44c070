// C ABI of the templates' arithmetic, over arrays of fp32 patterns: what the tests compare with the model.
#include <cstdint>

#include "nearflash/narrow.hpp"

using nearflash::Fp32;

namespace {

template <typename Operation>
void each(std::int64_t count, std::uint32_t* out, Operation operation) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = operation(i).bits;
}

Fp32 at(const std::uint32_t* bits, std::int64_t i) { return Fp32::of_bits(bits[i]); }

}  // namespace

#define BINARY(name, symbol)                                                                                        \
    extern "C" void name(std::int64_t n, const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t*,        \
                         std::uint32_t* out) {                                                                       \
        each(n, out, [=](std::int64_t i) { return at(a, i) symbol at(b, i); });                                      \
    }
BINARY(add, +)
BINARY(subtract, -)
BINARY(multiply, *)
BINARY(divide, /)

extern "C" void square_root(std::int64_t n, const std::uint32_t* a, const std::uint32_t*, const std::uint32_t*,
                            std::uint32_t* out) {
    each(n, out, [=](std::int64_t i) { return sqrt(at(a, i)); });
}
extern "C" void fused(std::int64_t n, const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t* c,
                      std::uint32_t* out) {
    each(n, out, [=](std::int64_t i) { return fma(at(a, i), at(b, i), at(c, i)); });
}
// Bits: a < b, a <= b, a == b.
extern "C" void compare(std::int64_t n, const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t*,
                        std::uint32_t* out) {
    for (std::int64_t i = 0; i < n; ++i) {
        const Fp32 x = at(a, i), y = at(b, i);
        out[i] = (x < y) | (x <= y) << 1 | (x == y) << 2;
    }
}
extern "C" void to_half(std::int64_t n, const std::uint32_t* a, const std::uint32_t*, const std::uint32_t*,
                        std::uint32_t* out) {
    each(n, out, [=](std::int64_t i) { return nearflash::half::round(a[i]); });
}
extern "C" void to_bfloat16(std::int64_t n, const std::uint32_t* a, const std::uint32_t*, const std::uint32_t*,
                            std::uint32_t* out) {
    each(n, out, [=](std::int64_t i) { return nearflash::bfloat16::round(a[i]); });
}
