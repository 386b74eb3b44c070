// half and bfloat16: 16-bit values rounded from fp32 to nearest even, subnormals kept, one NaN each.
//
// Formats are those of the contract (nearflash_config.hpp). A finite fp32 over the range becomes an infinity.
#pragma once

#include <cstdint>

#include "nearflash/real.hpp"
#include "nearflash_config.hpp"

namespace nearflash {

template <typename Format>
struct Narrow {
    static_assert(Format::bits == 16 && Format::exponent_bits >= 5, "Format must be fp16 or bf16");
    static constexpr int cut = 23 - Format::mantissa_bits;
    static constexpr std::uint32_t infinity = ((1u << Format::exponent_bits) - 1) << Format::mantissa_bits;

    std::uint16_t bits;

    static Narrow round(std::uint32_t value) {
        const std::uint32_t sign = (value >> 31) << 15, magnitude = value & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return {std::uint16_t(infinity | (1u << (Format::mantissa_bits - 1)))};
        // Exponent field in the narrow format: less than 1 for its subnormals, of which more bits are cut off.
        const int field = int(magnitude >> 23) - 127 + bias;
        const bool subnormal = field < 1 && bias < 127;
        const std::uint32_t fraction = subnormal ? (magnitude & 0x7fffffu) | 0x800000u : magnitude;
        const int places = !subnormal ? cut : field < cut - 24 ? 25 : cut + 1 - field;
        const std::uint32_t middle = 1u << (places - 1), lost = fraction & (2 * middle - 1), kept = fraction >> places;
        const std::uint32_t up = lost > middle || (lost == middle && (kept & 1));
        const std::uint32_t rebias = subnormal ? 0u : std::uint32_t(127 - bias) << Format::mantissa_bits;
        const std::uint32_t rounded = kept + up - rebias;
        return {std::uint16_t(sign | (rounded > infinity ? infinity : rounded))};
    }

    template <typename F>
    static Narrow round_real(F value) {
        return round(bits_of(value));
    }

    bool is_infinite() const { return (bits & 0x7fffu) == infinity; }

  private:
    static constexpr int bias = (1 << (Format::exponent_bits - 1)) - 1;
};

using half = Narrow<fp16>;
using bfloat16 = Narrow<bf16>;

}  // namespace nearflash
