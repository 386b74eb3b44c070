// Inner loops of attention: scores of index rows, products with K, weights, sums of V, each sum in a register.
//
// fp16 comes in, fp32 is computed with; sums are taken in any order. The loops over rows, K and V are there for up to
// HEADS query heads at once, which share what is loaded and converted.
//
// Source: 2^f as in the Cephes library (exp2f).

#pragma once

#include <algorithm>
#include <utility>

#include "vectors.hpp"

namespace nearflash {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.0e38f;       // a logit that is none
constexpr int HEADS = 3;                 // query heads at once: with more the sums do not fit the registers
constexpr int SUMS = LANES / 2;          // vectors of sums of each query head in score_rows
constexpr int ROW_TOKENS = SUMS * LANES; // that score_rows scores
constexpr int KEYS = 4;                  // tokens of `dots` at once

// Of so many query heads that are left: up to HEADS, none of them alone where it can be.
inline int heads_at_once(int64_t left) { return left == 4 ? 2 : int(std::min<int64_t>(left, HEADS)); }

// Calls with a constant number of query heads.
template <class Call> inline void with_heads(int heads, Call call) {
    if (heads == 3) return call(std::integral_constant<int, 3>());
    if (heads == 2) return call(std::integral_constant<int, 2>());
    call(std::integral_constant<int, 1>());
}

// Numbers

inline float fp16_value(uint16_t pattern) { return fp16_values(U16{pattern})[0]; }

inline F32 larger(F32 x, F32 y) { return x > y ? x : y; }

// The first so many bytes; 0 in the other lanes.
template <class V> inline V load_some(const void *from, int64_t bytes) {
    V some{};
    std::memcpy(&some, from, bytes);
    return some;
}

template <class Place, int... lanes> constexpr I32 make_lanes(Place place, std::integer_sequence<int, lanes...>) {
    return I32{place(lanes)...};
}

// Lanes of x and y, by their places: those of y are LANES and more.
template <class Place> inline F32 pick(F32 x, F32 y, Place place) {
    return __builtin_shuffle(x, y, make_lanes(place, std::make_integer_sequence<int, LANES>()));
}

// One number of all lanes, two of which `two` makes one.
template <class Two> inline float reduce(F32 x, Two two) {
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) {
        I32 places = (lane_numbers() + step) & (LANES - 1);
        x = two(x, __builtin_shuffle(x, places));
    }
    return x[0];
}

inline float sum_of(F32 x) { return reduce(x, [](F32 y, F32 z) { return y + z; }); }
inline float largest_of(F32 x) { return reduce(x, larger); }

// Of each two vectors, the sum of their lanes at `low` and of those `step` behind.
template <int count, class Place> inline void halve(F32 *vectors, Place low, int step) {
    for (int pair = 0; pair < count / 2; pair++) {
        const F32 x = vectors[2 * pair], y = vectors[2 * pair + 1];
        vectors[pair] = pick(x, y, low) + pick(x, y, [=](int lane) { return low(lane) + step; });
    }
}

// The sums of the lanes of each of LANES vectors, by a tree. The first two steps stay within four lanes, which
// processors shuffle at once.
inline F32 fold(F32 (&vectors)[LANES]) {
    halve<LANES>(vectors, [](int lane) { return lane / 4 * 4 + lane % 4 / 2 + LANES * (lane % 2); }, 2);
    halve<LANES / 2>(vectors, [](int lane) { return lane / 4 * 4 + lane % 2 + LANES * (lane % 4 / 2); }, 2);
    const auto low = [](int lane) { return lane / 4 * 8 + lane % 4; };
    if constexpr (LANES >= 8) halve<LANES / 4>(vectors, low, 4);
    if constexpr (LANES >= 16) halve<LANES / 8>(vectors, low, 4);
    return vectors[0];
}

// e^x of x <= 0, with a relative error below (2 + |x|)·2^-23; 0 from -87 down.
inline F32 exp_of(F32 x) {
    constexpr float polynomial[] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                                    5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
    const F32 least = splat(-87.0f), y = larger(x, least) * LOG2E, n = round_down(y + 0.5f), f = y - n;
    F32 p = splat(polynomial[0]);
    for (int factor = 1; factor < 7; factor++) p = fma(p, f, splat(polynomial[factor]));
    return x > least ? times_power(p, n) : F32{};
}

// The scalar product of fp32 numbers with fp16 ones.
inline float dot_half(const float *x, const uint16_t *y, int64_t count) {
    const int64_t whole = count / LANES * LANES, rest = count - whole;
    F32 sums{};
    for (int64_t i = 0; i < whole; i += LANES) sums = fma(load<F32>(x + i), fp16_values(load<U16>(y + i)), sums);
    if (rest) sums = fma(load_some<F32>(x + whole, 4 * rest), fp16_values(load_some<U16>(y + whole, 2 * rest)), sums);
    return sum_of(sums);
}

// The largest of `count` numbers, `lower` at least.
inline float find_largest(const float *x, int64_t count, float lower) {
    F32 most = splat(lower);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) most = larger(load<F32>(x + i), most);
    float found = largest_of(most);
    for (; i < count; i++) found = std::max(found, x[i]);
    return found;
}

// The sum of e^(factor·x - most), none of them above 1, which take the place of x where it is kept.
template <bool keeps> inline float sum_exponentials(float *x, int64_t count, float factor, float most) {
    const F32 factors = splat(factor), less = splat(-most);
    F32 total{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const F32 result = exp_of(fma(factors, load<F32>(x + i), less));
        total += result;
        if (keeps) store(x + i, result);
    }
    if (const int64_t rest = count - i) {
        const F32 result = exp_of(fma(factors, load_some<F32>(x + i, 4 * rest), less));
        total += lane_numbers() < int32_t(rest) ? result : F32{};
        if (keeps) std::memcpy(x + i, &result, rest * sizeof *x);
    }
    return sum_of(total);
}

// The sums of e^(factor·x - most) of each of LANES entries of `vectors` vectors.
inline F32 sum_entries(const float *x, int64_t vectors, float factor, float most) {
    const F32 factors = splat(factor), less = splat(-most);
    F32 totals[LANES]{};
    for (int entry = 0; entry < LANES; entry++)
        for (int64_t part = 0; part < vectors; part++, x += LANES)
            totals[entry] += exp_of(fma(factors, load<F32>(x), less));
    return fold(totals);
}

inline void scale(float factor, float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

// Scores

// Rows of an index block: row rows[j] of `length` bytes, the tokens' numbers of a dim, begins at rows[j]·length.
struct IndexRows {
    const uint8_t *codes;
    int64_t length, dims, ahead;  // ahead: bytes from a place on to the same one of what is wanted next
    const int64_t *rows;
};

// Vectors of one load of codes: of int4 the even tokens' numbers, then the odd ones'.
template <int bits> constexpr int loaded = bits == 4 ? 2 : 1;
template <int bits> constexpr int load_bytes = bits == 16 ? 2 * LANES : LANES;

template <int bits> inline void load_numbers(const uint8_t *codes, F32 *numbers) {
    if constexpr (bits == 16) {
        numbers[0] = fp16_values(load<U16>(codes));
    } else {
        const I32 wide = widen(load<U8>(codes));
        numbers[0] = __builtin_convertvector(bits == 4 ? wide & 15 : wide, F32);
        if constexpr (bits == 4) numbers[1] = __builtin_convertvector(wide >> 4, F32);
    }
}

// Scores of sums·LANES tokens for `heads` query heads: each `base` and the sum over dims of weights times the numbers
// of its row. Weights of the heads are `dims` apart, their scores `width`.
// Where there are fewer than one load's bytes, `some_bytes` are read, and as many scores written.
template <int bits, int heads, int sums, bool is_some = false>
inline void score_rows(const IndexRows &index, const uint8_t *codes, const float *weights, const float *base,
                       float *scores, int64_t width, int64_t some_bytes = load_bytes<bits>) {
    constexpr int each = loaded<bits>, loads = sums / each;
    F32 totals[heads][sums];
    for (int head = 0; head < heads; head++)
#pragma GCC unroll 8
        for (int part = 0; part < sums; part++) totals[head][part] = splat(base[head]);
    for (int64_t j = 0; j < index.dims; j++) {
        const uint8_t *const line = codes + index.rows[j] * index.length;
#pragma GCC unroll 8
        for (int byte = 0; byte < loads * load_bytes<bits>; byte += 64) __builtin_prefetch(line + index.ahead + byte);
        F32 factors[heads];
        for (int head = 0; head < heads; head++) factors[head] = splat(weights[head * index.dims + j]);
#pragma GCC unroll 8
        for (int part = 0; part < loads; part++) {
            F32 numbers[each];
            const uint8_t *const at = line + part * load_bytes<bits>;
            if constexpr (is_some) {
                uint8_t padded[load_bytes<bits>]{};
                std::memcpy(padded, at, some_bytes);
                load_numbers<bits>(padded, numbers);
            } else {
                load_numbers<bits>(at, numbers);
            }
#pragma GCC unroll 3
            for (int head = 0; head < heads; head++)
#pragma GCC unroll 2
                for (int number = 0; number < each; number++) {
                    F32 &total = totals[head][part * each + number];
                    total = fma(factors[head], numbers[number], total);
                }
        }
    }
    for (int head = 0; head < heads; head++) {
        float some[is_some ? sums * LANES : 1], *const out = is_some ? some : scores + head * width;
        for (int part = 0; part < sums; part += each) {
            F32 *const done = totals[head] + part;
            if constexpr (bits == 4) {
                const F32 even = done[0], odd = done[1];
                done[0] = pick(even, odd, [](int lane) { return lane / 2 + LANES * (lane % 2); });
                done[1] = pick(even, odd, [](int lane) { return lane / 2 + LANES / 2 + LANES * (lane % 2); });
            }
            for (int number = 0; number < each; number++) store(out + (part + number) * LANES, done[number]);
        }
        if constexpr (is_some) std::memcpy(scores + head * width, some, some_bytes * 8 / bits * sizeof(float));
    }
}

// Products with K, and sums of V

// Vectors whose lanes' sums are the products of q of heads, `padded` apart, a number of vectors each, with KEYS tokens' K.
template <int heads>
inline void multiply(const float *q, int64_t padded, const uint16_t *keys, int64_t stride, F32 (&sums)[heads][KEYS]) {
    for (int64_t i = 0; i < padded; i += LANES) {
        F32 wide[KEYS];
#pragma GCC unroll 4
        for (int token = 0; token < KEYS; token++) wide[token] = fp16_values(load<U16>(keys + token * stride + i));
#pragma GCC unroll 3
        for (int head = 0; head < heads; head++) {
            const F32 own = load<F32>(q + head * padded + i);
#pragma GCC unroll 4
            for (int token = 0; token < KEYS; token++) sums[head][token] = fma(own, wide[token], sums[head][token]);
        }
    }
}

// Those products of LANES tokens, `width` apart for the heads.
template <int heads>
inline void dots(const float *q, int64_t padded, const uint16_t *keys, int64_t stride, float *logits, int64_t width) {
    F32 partial[heads][LANES];
    for (int first = 0; first < LANES; first += KEYS) {
        F32 sums[heads][KEYS]{};
        multiply<heads>(q, padded, keys + first * stride, stride, sums);
        for (int head = 0; head < heads; head++)
            for (int token = 0; token < KEYS; token++) partial[head][first + token] = sums[head][token];
    }
    for (int head = 0; head < heads; head++) store(logits + head * width, fold(partial[head]));
}

// And of KEYS tokens.
template <int heads>
inline void few_dots(const float *q, int64_t padded, const uint16_t *keys, int64_t stride, float *logits, int64_t width) {
    F32 sums[heads][KEYS]{};
    multiply<heads>(q, padded, keys, stride, sums);
    for (int head = 0; head < heads; head++)
        for (int token = 0; token < KEYS; token++) logits[head * width + token] = sum_of(sums[head][token]);
}

// Add to `out` of heads, `between` apart, V of `count` tokens by their weights, `width` apart: `parts` vectors of each.
template <int heads, int parts>
inline void add_values(const float *weights, int64_t width, const uint16_t *values, int64_t stride, int64_t count,
                       float *out, int64_t between) {
    F32 sums[heads][parts];
    for (int head = 0; head < heads; head++)
        for (int part = 0; part < parts; part++) sums[head][part] = load<F32>(out + head * between + part * LANES);
    for (int64_t t = 0; t < count; t++, values += stride) {
        F32 wide[parts];
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) wide[part] = fp16_values(load<U16>(values + part * LANES));
#pragma GCC unroll 3
        for (int head = 0; head < heads; head++) {
            const F32 weight = splat(weights[head * width + t]);
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) sums[head][part] = fma(weight, wide[part], sums[head][part]);
        }
    }
    for (int head = 0; head < heads; head++)
        for (int part = 0; part < parts; part++) store(out + head * between + part * LANES, sums[head][part]);
}

}  // namespace nearflash
