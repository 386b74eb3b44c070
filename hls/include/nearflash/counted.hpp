// Counted: a scalar that counts what is done with it, for `nearflash hls analyze`. Simulation only.
//
// Every value knows the cycle in which it is ready, with the latencies of `Latency`: the latest is the depth of the
// lane's pipeline. Mixing with other types does not compile, so that no double slips in.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

namespace nearflash {

enum class Operation { add, mul, fma, div, sqrt, compare, count };

struct Counted {
    using Counts = std::array<int, int(Operation::count)>;

    // Cycles of each operation; set before use.
    static inline Counts latency{};
    static inline Counts counts{};

    float value = 0;
    int ready = 0;  // cycle

    Counted() = default;
    template <typename T, typename = std::enable_if_t<std::is_same_v<T, int> || std::is_same_v<T, float>>>
    explicit Counted(T constant) : value(float(constant)) {}

    template <typename... Operands>
    static Counted result(Operation operation, float value, const Operands&... operands) {
        ++counts[int(operation)];
        Counted made(value);
        made.ready = std::max({operands.ready...}) + latency[int(operation)];
        return made;
    }
};

inline Counted operator+(Counted a, Counted b) { return Counted::result(Operation::add, a.value + b.value, a, b); }
inline Counted operator-(Counted a, Counted b) { return Counted::result(Operation::add, a.value - b.value, a, b); }
inline Counted operator*(Counted a, Counted b) { return Counted::result(Operation::mul, a.value * b.value, a, b); }
inline Counted operator/(Counted a, Counted b) { return Counted::result(Operation::div, a.value / b.value, a, b); }
inline Counted sqrt(Counted a) { return Counted::result(Operation::sqrt, std::sqrt(a.value), a); }
inline Counted fma(Counted a, Counted b, Counted c) {
    return Counted::result(Operation::fma, std::fma(a.value, b.value, c.value), a, b, c);
}
inline Counted abs(Counted a) {
    a.value = std::fabs(a.value);
    return a;
}
inline Counted operator-(Counted a) {
    a.value = -a.value;
    return a;
}

inline bool compared(bool result) {
    ++Counted::counts[int(Operation::compare)];
    return result;
}
inline bool operator==(Counted a, Counted b) { return compared(a.value == b.value); }
inline bool operator!=(Counted a, Counted b) { return compared(a.value != b.value); }
inline bool operator<(Counted a, Counted b) { return compared(a.value < b.value); }
inline bool operator>(Counted a, Counted b) { return compared(a.value > b.value); }
inline bool operator<=(Counted a, Counted b) { return compared(a.value <= b.value); }
inline bool operator>=(Counted a, Counted b) { return compared(a.value >= b.value); }

}  // namespace nearflash
