// Fp32: IEEE 754 single precision in integers, so that synthesis gives what simulation gives.
//
// The vendor's floating-point cores take a subnormal for zero; these keep it, as the contract says (docs/contracts/numerics.md).
// Every operation makes the exact result (or one with a sticky last bit) as a Raw and rounds it once, to nearest even.
// Equal to the host's float to the bit, but for NaN: here there is one, 0x7fc00000.
#pragma once

#include <cstdint>
#include <cstring>

namespace nearflash {

struct Fp32 {
    std::uint32_t bits;

    static constexpr std::uint32_t nan_bits = 0x7fc00000u, infinity_bits = 0x7f800000u;

    Fp32() = default;
    explicit constexpr Fp32(int small) : bits(of_small(small)) {}
    explicit Fp32(float constant) { std::memcpy(&bits, &constant, sizeof bits); }
    template <typename T>
    explicit Fp32(T) = delete;  // write F(1) or F(0.5f)

    static constexpr Fp32 of_bits(std::uint32_t bits) {
        Fp32 value(0);
        value.bits = bits;
        return value;
    }

    constexpr bool negative() const { return bits >> 31; }
    constexpr std::uint32_t magnitude() const { return bits & 0x7fffffffu; }
    constexpr bool is_nan() const { return magnitude() > infinity_bits; }
    constexpr bool is_infinite() const { return magnitude() == infinity_bits; }
    constexpr bool is_zero() const { return magnitude() == 0; }

  private:
    // -1, 0, 1 and other integers of less than 24 bits.
    static constexpr std::uint32_t of_small(int value) {
        if (value == 0) return 0;
        std::uint32_t significand = value < 0 ? -value : value, exponent = 150;
        while (significand < 0x800000u) significand <<= 1, --exponent;
        return (value < 0 ? 0x80000000u : 0u) | (exponent << 23) | (significand & 0x7fffffu);
    }
};

namespace detail {

// (-1)^negative * significand * 2^exponent; the last bit of the significand may be sticky.
struct Raw {
    bool negative;
    int exponent;
    std::uint64_t significand;
};

inline Raw unpack(Fp32 value) {
    const int field = value.magnitude() >> 23;
    const std::uint64_t fraction = value.bits & 0x7fffffu;
    return {value.negative(), (field ? field : 1) - 150, field ? fraction | 0x800000u : fraction};
}

// Shift right, the bits lost kept as a sticky last one.
inline std::uint64_t shift_sticky(std::uint64_t value, int places) {
    if (places > 62) return value != 0;
    return (value >> places) | ((value & ((std::uint64_t(1) << places) - 1)) != 0);
}

// Most significant bit to bit `top`; the significand must not be zero.
inline Raw normalise(Raw raw, int top = 62) {
    const int places = __builtin_clzll(raw.significand) - (63 - top);
    return {raw.negative, raw.exponent - places, raw.significand << places};
}

// The one rounder. Where the last bit is sticky there must be 26 bits or more, and 63 at most.
inline Fp32 round(Raw raw) {
    const std::uint32_t sign = raw.negative ? 0x80000000u : 0u;
    if (raw.significand == 0) return Fp32::of_bits(sign);
    raw = normalise(raw);
    const int field = raw.exponent + 62 + 127;  // of a normal number
    if (field > 254) return Fp32::of_bits(sign | Fp32::infinity_bits);
    const std::uint64_t aligned = field < 1 ? shift_sticky(raw.significand, 1 - field) : raw.significand;
    const std::uint64_t half = std::uint64_t(1) << 38, lost = aligned & (2 * half - 1);
    const std::uint32_t kept = std::uint32_t(aligned >> 39);
    const std::uint32_t up = lost > half || (lost == half && (kept & 1));
    // The leading one of `kept` adds one to the exponent field, and so does a carry out of the fraction.
    return Fp32::of_bits(sign | ((std::uint32_t(field < 1 ? 0 : field - 1) << 23) + kept + up));
}

inline Raw product(Raw a, Raw b) {
    return {a.negative != b.negative, a.exponent + b.exponent, a.significand * b.significand};
}

// Operands have at most 48 bits: where more than one bit cancels, the smaller one has lost none.
inline Raw sum(Raw a, Raw b) {
    if (a.significand == 0 && b.significand == 0) return {a.negative && b.negative, 0, 0};
    if (a.significand == 0) return b;
    if (b.significand == 0) return a;
    a = normalise(a, 61), b = normalise(b, 61);  // their sum has 63 bits at most
    const bool swap = a.exponent < b.exponent || (a.exponent == b.exponent && a.significand < b.significand);
    const Raw large = swap ? b : a, small = swap ? a : b;
    const std::uint64_t moved = shift_sticky(small.significand, large.exponent - small.exponent);
    if (large.negative == small.negative) return {large.negative, large.exponent, large.significand + moved};
    const std::uint64_t difference = large.significand - moved;
    return {large.negative && difference != 0, large.exponent, difference};
}

}  // namespace detail

inline Fp32 fma(Fp32 a, Fp32 b, Fp32 c) {
    const bool product_infinite = a.is_infinite() || b.is_infinite(), sign = a.negative() != b.negative();
    if (a.is_nan() || b.is_nan() || c.is_nan()) return Fp32::of_bits(Fp32::nan_bits);
    if (product_infinite && (a.is_zero() || b.is_zero() || (c.is_infinite() && c.negative() != sign)))
        return Fp32::of_bits(Fp32::nan_bits);
    if (product_infinite) return Fp32::of_bits(Fp32::infinity_bits | std::uint32_t(sign) << 31);
    if (c.is_infinite()) return c;
    return detail::round(detail::sum(detail::product(detail::unpack(a), detail::unpack(b)), detail::unpack(c)));
}

inline Fp32 operator*(Fp32 a, Fp32 b) {
    const std::uint32_t sign = (a.bits ^ b.bits) & 0x80000000u;
    const bool infinite = a.is_infinite() || b.is_infinite();
    if (a.is_nan() || b.is_nan() || (infinite && (a.is_zero() || b.is_zero()))) return Fp32::of_bits(Fp32::nan_bits);
    if (infinite) return Fp32::of_bits(sign | Fp32::infinity_bits);
    return detail::round(detail::product(detail::unpack(a), detail::unpack(b)));
}

inline Fp32 operator+(Fp32 a, Fp32 b) {
    if (a.is_nan() || b.is_nan() || (a.is_infinite() && b.is_infinite() && a.bits != b.bits))
        return Fp32::of_bits(Fp32::nan_bits);
    if (a.is_infinite()) return a;
    if (b.is_infinite()) return b;
    return detail::round(detail::sum(detail::unpack(a), detail::unpack(b)));
}

inline Fp32 abs(Fp32 a) { return Fp32::of_bits(a.magnitude()); }
inline Fp32 operator-(Fp32 a) { return Fp32::of_bits(a.bits ^ 0x80000000u); }
inline Fp32 operator-(Fp32 a, Fp32 b) { return a + -b; }

inline Fp32 operator/(Fp32 a, Fp32 b) {
    const std::uint32_t sign = (a.bits ^ b.bits) & 0x80000000u;
    if (a.is_nan() || b.is_nan() || (a.is_infinite() && b.is_infinite()) || (a.is_zero() && b.is_zero()))
        return Fp32::of_bits(Fp32::nan_bits);
    if (a.is_infinite() || b.is_zero()) return Fp32::of_bits(sign | Fp32::infinity_bits);
    if (b.is_infinite() || a.is_zero()) return Fp32::of_bits(sign);
    const detail::Raw x = detail::normalise(detail::unpack(a)), y = detail::normalise(detail::unpack(b));
    const std::uint64_t dividend = x.significand >> 12, divisor = y.significand >> 39;  // 51 and 24 bits, exact
    const std::uint64_t quotient = dividend / divisor;
    return detail::round({sign != 0, x.exponent - y.exponent - 27, quotient | (dividend % divisor != 0)});
}

inline Fp32 sqrt(Fp32 a) {
    if (a.is_nan() || (a.negative() && !a.is_zero())) return Fp32::of_bits(Fp32::nan_bits);
    if (a.is_infinite() || a.is_zero()) return a;
    const detail::Raw raw = detail::normalise(detail::unpack(a));
    const bool odd = raw.exponent & 1;
    const std::uint64_t radicand = odd ? raw.significand >> 9 : raw.significand >> 10;  // 53 or 54 bits, exact
    std::uint64_t root = 0, rest = radicand;
    // Before the step of `bit`: rest = radicand - root^2, and root^2 <= radicand < (root + 2 bit)^2.
    for (std::uint64_t bit = std::uint64_t(1) << 26; bit; bit >>= 1) {
        const std::uint64_t trial = (2 * root + bit) * bit;
        if (trial <= rest) rest -= trial, root |= bit;
    }
    return detail::round({false, (raw.exponent + (odd ? 9 : 10)) / 2 - 1, root << 1 | (rest != 0)});
}

inline bool operator==(Fp32 a, Fp32 b) {
    return !a.is_nan() && !b.is_nan() && (a.bits == b.bits || (a.is_zero() && b.is_zero()));
}
inline bool operator!=(Fp32 a, Fp32 b) { return !(a == b); }
inline bool operator<(Fp32 a, Fp32 b) {
    if (a.is_nan() || b.is_nan() || (a.is_zero() && b.is_zero())) return false;
    if (a.negative() != b.negative()) return a.negative();
    return a.negative() ? a.bits > b.bits : a.bits < b.bits;
}
inline bool operator>(Fp32 a, Fp32 b) { return b < a; }
inline bool operator<=(Fp32 a, Fp32 b) { return a < b || a == b; }
inline bool operator>=(Fp32 a, Fp32 b) { return b <= a; }

}  // namespace nearflash
