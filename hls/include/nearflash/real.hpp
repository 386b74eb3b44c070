// Real: the scalar that kernels compute with, and what an optimizer may do with it.
//
// An optimizer is written for any scalar F: `float` (simulation), `Fp32` (synthesis: integers, subnormals kept),
// `Counted` (counts operations). All have + - * / and comparisons, abs,
// sqrt, fma(a, b, c), and F(1) or F(0.5f) for a constant.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "nearflash/fp32.hpp"

namespace nearflash {

#if defined(NEARFLASH_REAL)
using Real = NEARFLASH_REAL;
#elif defined(__SYNTHESIS__) || defined(__VITIS_HLS__)
using Real = Fp32;
#else
using Real = float;
#endif

inline float abs(float value) { return std::fabs(value); }
inline float sqrt(float value) { return std::sqrt(value); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

inline std::uint32_t bits_of(Fp32 value) { return value.bits; }
inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The scalar of a pattern.
template <typename F>
inline F real_of(std::uint32_t bits) {
    static_assert(sizeof(F) == sizeof bits, "F must be a scalar of 32 bits");
    F value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <>
inline Fp32 real_of<Fp32>(std::uint32_t bits) {
    return Fp32::of_bits(bits);
}

template <typename F>
inline bool is_finite(F value) {
    return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

// The value, or the one NaN of the contract.
inline Fp32 one_nan(Fp32 value) { return value.is_nan() ? Fp32::of_bits(Fp32::nan_bits) : value; }
inline float one_nan(float value) { return value != value ? real_of<float>(Fp32::nan_bits) : value; }

}  // namespace nearflash
