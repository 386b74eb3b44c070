// Optimizer steps on the host's vectors: state in any format in, one step of a rule, state and copy out.
//
// One pass does a block: a parameter is read, updated, written and rounded to its copy while it is in the processor.
// Equals nearflash.model.update to the bit: every operation rounds by itself, as nothing is contracted, and a fused
// multiply-add is there where `fma` asks for one. Called by lane.py and state.py.
//
// Numerics: docs/contracts/numerics.md; nearflash.abi.optimizers.

#include <algorithm>
#include <array>

#include "vectors.hpp"

using namespace nearflash;

enum Kind : int32_t { ADAM, SGD, ADAGRAD, LION };
enum Profile : int32_t { IEEE, TORCH_FUSED, DEEPSPEED };
enum StateFormat : int32_t { STATE_FP32, STATE_BF16, STATE_MX8 };
enum CopyFormat : int32_t { NO_COPY, COPY_FP16, COPY_BF16 };
enum MasterFormat : int32_t { MASTER_FP32, MASTER_SPLIT };
enum Role : int32_t { M, V };

// One step of one rule; what it has no scalar for is 0.
struct Rule {
    Kind kind;
    Profile profile;
    StateFormat state_format;
    CopyFormat copy_format;
    MasterFormat master;
    uint32_t step;
    int32_t decoupled, decays, has_momentum, nesterov;
    float lr, eps, decay;
    float root;  // of bias correction 2; its inverse in profile deepspeed
    float beta1, gain1, beta2, gain2;
};

// Parameters of the flat vector from first_param on; arrays change in place, those that a rule lacks are null.
struct Block {
    int64_t params, first_param;
    const float *g;
    float *p;
    void *m, *v;
    uint8_t *m_scale, *v_scale;
    uint16_t *copy, *weight, *rest;
    const uint16_t *g_bf16;  // in the place of g where it is not null, each times g_scale
    float g_scale;
};

struct Counts {
    int64_t nonfinite_gradients, copy_overflows;
};

// An array of m or v: its elements, in a format that is not fp32, and their scales.
struct Stored {
    Role role;
    StateFormat format;
    void *elements;
    uint8_t *scales;
};

namespace {

struct Params {
    F32 g, p, m, v;
};

// Weight decay, with which all orders begin: of the gradient, or of the parameter where it is decoupled.
template <Profile profile> inline void decay(const Rule &rule, Params &x) {
    if (!rule.decays) return;
    const F32 factor = splat(rule.decay);
    if (rule.decoupled)
        x.p = profile == DEEPSPEED ? fma(x.p, factor, x.p) : x.p * factor;
    else
        x.g = profile == IEEE ? x.g + x.p * factor : fma(x.p, factor, x.g);
}

template <Profile profile> struct Adam {
    static constexpr bool has_m = true, has_v = true;

    static void update(const Rule &rule, Params &x) {
        const F32 gain1 = splat(rule.gain1), gain2 = splat(rule.gain2);
        decay<profile>(rule, x);
        if constexpr (profile == IEEE) {
            x.m = x.m * rule.beta1 + x.g * gain1;
            x.v = x.v * rule.beta2 + x.g * gain2 * x.g;
            x.p = x.p - x.m / (square_root(x.v) / rule.root + rule.eps) * rule.lr;
        } else if constexpr (profile == TORCH_FUSED) {
            x.m = fma(x.g - x.m, gain1, x.m);
            x.v = fma(x.g * gain2, x.g, x.v * rule.beta2);
            x.p = x.p - x.m * rule.lr / (square_root(x.v) / rule.root + rule.eps);
        } else {
            x.m = fma(x.g, gain1, x.m * rule.beta1);
            x.v = fma(x.g * x.g, gain2, x.v * rule.beta2);
            x.p = fma(x.m / fma(square_root(x.v), splat(rule.root), splat(rule.eps)), splat(-rule.lr), x.p);
        }
    }
};

template <Profile profile, bool has_momentum> struct Sgd {
    static constexpr bool has_m = has_momentum, has_v = false;

    static void update(const Rule &rule, Params &x) {
        decay<profile>(rule, x);
        F32 direction = x.g;
        if constexpr (has_momentum) {
            const F32 gain = splat(rule.gain1), momentum = splat(rule.beta2);
            x.m = profile == IEEE ? x.m * rule.beta1 + x.g * gain : fma(x.g, gain, x.m * rule.beta1);
            direction = x.m;
            if (rule.nesterov) direction = profile == IEEE ? x.g + x.m * momentum : fma(x.m, momentum, x.g);
        }
        x.p = profile == IEEE ? x.p - direction * rule.lr : fma(direction, splat(-rule.lr), x.p);
    }
};

template <Profile profile> struct Adagrad {
    static constexpr bool has_m = false, has_v = true;

    static void update(const Rule &rule, Params &x) {
        decay<profile>(rule, x);
        x.v = profile == IEEE ? x.v + x.g * x.g : fma(x.g, x.g, x.v);
        const F32 root = square_root(x.v) + rule.eps;
        x.p = x.p - (profile == IEEE ? x.g / root * rule.lr : x.g * rule.lr / root);
    }
};

struct Lion {
    static constexpr bool has_m = true, has_v = false;

    static void update(const Rule &rule, Params &x) {
        decay<IEEE>(rule, x);
        const F32 direction = x.m * rule.beta1 + x.g * rule.gain1, zero{};
        F32 move = direction == zero ? zero : direction;  // a zero changes nothing, a NaN stays one
        move = direction > zero ? splat(rule.lr) : move;
        move = direction < zero ? splat(-rule.lr) : move;
        x.p = x.p - move;
        x.m = x.m * rule.beta2 + x.g * rule.gain2;
    }
};

inline int64_t sum_of(I32 x) {
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

// Some parameters in fp32, but for a split master; m, v and copy may lack, and p or its halves do.
struct Wide {
    const float *g;
    float *p, *m, *v;
    uint16_t *copy, *weight, *rest;
};

// Split masters (nearflash.abi.optimizers.state). NaN to split are canonical.
inline F32 join(U16 weight, U16 rest) {
    const I32 low = widen(rest) << 16 >> 16;
    return number_of((I32)(((Vector<uint32_t>)widen(weight) << 16) + (Vector<uint32_t>)low));
}
inline U16 weight_of(F32 p) { return words_of((I32)(((Vector<uint32_t>)p + 0x8000) >> 16)); }
inline U16 rest_of(F32 p) { return words_of(bits_of(p)); }

// The vector at place i: new numbers in place, and in the counts -1 for each lane that counts.
template <class Order> inline void update_vector(const Rule &rule, const Wide &x, int64_t i, I32 &nonfinite, I32 &overflows) {
    const bool is_split = rule.master == MASTER_SPLIT;
    Params now{load<F32>(x.g + i), {}, {}, {}};
    now.p = is_split ? join(load<U16>(x.weight + i), load<U16>(x.rest + i)) : load<F32>(x.p + i);
    if constexpr (Order::has_m) now.m = load<F32>(x.m + i);
    if constexpr (Order::has_v) now.v = load<F32>(x.v + i);
    nonfinite += (bits_of(now.g) & MAGNITUDE_BITS) >= INFINITY_BITS;
    Order::update(rule, now);
    const F32 p = with_one_nan(now.p);
    if (is_split)
        store(x.weight + i, weight_of(p)), store(x.rest + i, rest_of(p));
    else
        store(x.p + i, p);
    if constexpr (Order::has_m) store(x.m + i, with_one_nan(now.m));
    if constexpr (Order::has_v) store(x.v + i, with_one_nan(now.v));
    if (rule.copy_format == NO_COPY && !is_split) return;
    const bool is_fp16 = rule.copy_format == COPY_FP16;
    if (!is_split) store(x.copy + i, is_fp16 ? fp16_patterns(p) : bf16_patterns(p));
    const I32 magnitude = bits_of(p) & MAGNITUDE_BITS;
    const int32_t least_overflow = is_fp16 ? 0x477FF000 : 0x7F7F8000;
    overflows += (magnitude >= least_overflow) & (magnitude < INFINITY_BITS);
}

template <class T> void copy_some(T *to, const T *values, int64_t count) { std::memcpy(to, values, count * sizeof(T)); }

// A block in fp32.
template <class Order> void update_wide(const Rule &given, const Wide &arrays, int64_t params, Counts &counts) {
    const Rule rule = given;  // no array may be a part of it
    const Wide x = arrays;
    I32 nonfinite{}, overflows{};
    const int64_t whole = params / LANES * LANES, rest = params - whole;
    for (int64_t i = 0; i < whole; i += LANES) update_vector<Order>(rule, x, i, nonfinite, overflows);
    if (rest) {
        float g[LANES]{}, p[LANES]{}, m[LANES]{}, v[LANES]{};
        uint16_t copy[LANES], weight[LANES]{}, low[LANES]{};
        copy_some(g, x.g + whole, rest);
        if (rule.master == MASTER_SPLIT)
            copy_some(weight, x.weight + whole, rest), copy_some(low, x.rest + whole, rest);
        else
            copy_some(p, x.p + whole, rest);
        if (Order::has_m) copy_some(m, x.m + whole, rest);
        if (Order::has_v) copy_some(v, x.v + whole, rest);
        update_vector<Order>(rule, {g, p, m, v, copy, weight, low}, 0, nonfinite, overflows);
        if (rule.master == MASTER_SPLIT)
            copy_some(x.weight + whole, weight, rest), copy_some(x.rest + whole, low, rest);
        else
            copy_some(x.p + whole, p, rest);
        if (Order::has_m) copy_some(x.m + whole, m, rest);
        if (Order::has_v) copy_some(x.v + whole, v, rest);
        if (rule.copy_format != NO_COPY) copy_some(x.copy + whole, copy, rest);
    }
    counts.nonfinite_gradients -= sum_of(nonfinite);
    counts.copy_overflows -= sum_of(overflows);
}

using Update = void (*)(const Rule &, const Wide &, int64_t, Counts &);

template <Profile profile> Update update_of(const Rule &rule) {
    switch (rule.kind) {
        case ADAM: return update_wide<Adam<profile>>;
        case SGD: return rule.has_momentum ? update_wide<Sgd<profile, true>> : update_wide<Sgd<profile, false>>;
        case ADAGRAD: return update_wide<Adagrad<profile>>;
        case LION: return update_wide<Lion>;
    }
    __builtin_unreachable();
}

Update update_of(const Rule &rule) {
    switch (rule.profile) {
        case IEEE: return update_of<IEEE>(rule);
        case TORCH_FUSED: return update_of<TORCH_FUSED>(rule);
        case DEEPSPEED: return update_wide<Adam<DEEPSPEED>>;
    }
    __builtin_unreachable();
}

// Narrow state

constexpr int BLOCK_PARAMS = 32;   // that share a scale
constexpr int TILE_PARAMS = 8192;  // that share a key of the dither
constexpr int PART_PARAMS = 1024;  // that are fp32 at once: in the first cache
constexpr int DITHER_BITS = 16, DITHER_MASK = 0xFFFF;
constexpr int FRACTION_BITS = 23, FIELD_MASK = 0xFF, MANTISSA_BITS = 3;
constexpr int CUT_BITS = FRACTION_BITS - MANTISSA_BITS - DITHER_BITS;  // below the dither, in a significand

// One byte of a block: [sign,] exponent field, mantissa (nearflash.abi.optimizers.state.BlockElement).
struct Element {
    int32_t top, not_a_number;
    bool is_signed, keeps_small;

    int32_t least_scale() const { return top + MANTISSA_BITS; }
};
constexpr Element MX8[] = {{14, 0x7F, true, false}, {30, 0xFF, false, true}};

inline I32 larger(I32 x, I32 y) { return x > y ? x : y; }
inline I32 smaller(I32 x, I32 y) { return x < y ? x : y; }

// The first half against the second, until one is left: lane by lane it took a sixth of the encoder's time.
template <int lanes> inline int32_t largest_of(Vector<int32_t, lanes> x) {
    if constexpr (lanes == 1)
        return x[0];
    else {
        using Half = Vector<int32_t, lanes / 2>;
        const Half low = load<Half>(&x), high = load<Half>((const int32_t *)&x + lanes / 2);
        return largest_of<lanes / 2>(low > high ? low : high);
    }
}

// 2^(field - 127); infinity for 255.
inline F32 power_of(I32 field) { return number_of(field << FRACTION_BITS); }

template <Role role> inline F32 decode_codes(I32 codes, int32_t scale) {
    constexpr Element element = MX8[role];
    const I32 magnitude = element.is_signed ? codes & 0x7F : codes;
    // Field and mantissa are those of an fp32 number; of field 0 they are taken as of 1, and the hidden bit away again.
    const I32 is_small = magnitude < 1 << MANTISSA_BITS, hidden = is_small & 1 << FRACTION_BITS;
    const int32_t bias = (127 - element.top) << FRACTION_BITS;
    F32 value = number_of((magnitude << (FRACTION_BITS - MANTISSA_BITS)) + bias + hidden);
    value -= number_of(is_small & (bias + (1 << FRACTION_BITS)));
    if (element.is_signed) value = number_of(bits_of(value) | (codes & 0x80) << 24);
    value *= power_of(splat(std::max(scale, element.least_scale())));
    return codes == element.not_a_number ? number_of(splat(NAN_BITS)) : value;
}

template <Role role> void decode_blocks(int64_t params, const uint8_t *codes, const uint8_t *scales, float *out) {
    for (int64_t i = 0; i < params; i += LANES)
        store(out + i, decode_codes<role>(widen(load<U8>(codes + i)), scales[i / BLOCK_PARAMS]));
}

template <class T> inline T pattern_of(T place) {
    place ^= place << 6 & DITHER_MASK;
    place ^= place >> 5;
    return place ^ (place << 9 & DITHER_MASK);
}

// What is added to the parameters from this one on before they are cut off, in a tile of this key.
inline I32 dither(int64_t param, uint32_t key) {
    return (pattern_of(lane_numbers() + int32_t(param % TILE_PARAMS)) + int32_t(key)) & DITHER_MASK;
}

// The same, CUT_BITS to the left, at a place of the block whose first parameter has this pattern. The pattern is linear
// over GF(2): those of a block's places stay, so that a vector takes three operations.
inline I32 raised_dither(int place, int32_t block_pattern, uint32_t key) {
    const I32 pattern = pattern_of(lane_numbers() + place) << CUT_BITS ^ block_pattern << CUT_BITS;
    return (pattern + int32_t(key << CUT_BITS)) & DITHER_MASK << CUT_BITS;
}

uint32_t mix(uint32_t word) {
    constexpr int shifts[][2] = {{10, 7}, {5, 13}, {15, 16}};
    for (int round = 0; round < 6; round++) {
        word += word << shifts[round % 3][0];
        word ^= word >> shifts[round % 3][1];
    }
    return word;
}

uint32_t dither_key(uint32_t step, Role role, int64_t param) {
    return mix(mix(2 * step + role) + uint32_t(param / TILE_PARAMS)) >> (32 - DITHER_BITS);
}

// Codes of finite numbers that are normal in the element's format: exponent and mantissa are rounded as they stand.
template <Role role> inline I32 encode_normal(I32 bits, int32_t scale, I32 raised_dither) {
    constexpr Element element = MX8[role];
    const I32 offset = (bits & MAGNITUDE_BITS) - ((scale - element.top) << FRACTION_BITS);
    const I32 code = (offset + raised_dither) >> (CUT_BITS + DITHER_BITS);
    return element.is_signed ? code | (bits >> 24 & 0x80) : code;
}

template <Role role> inline I32 encode_any(I32 bits, int32_t scale, I32 raised_dither) {
    constexpr Element element = MX8[role];
    const I32 one = splat(1), zero = splat(0), field = bits >> FRACTION_BITS & FIELD_MASK;
    // The element's exponent field, before it is known whether there is one so small.
    const I32 exponent = larger(field, one) - scale + element.top;
    const I32 significand = (bits & 0x7FFFFF) | (field > 0 ? splat(0x800000) : zero);
    const I32 cut = smaller(CUT_BITS + larger(1 - exponent, zero), splat(31));
    const I32 kept = ((significand >> cut) + (raised_dither >> CUT_BITS)) >> DITHER_BITS;
    I32 code = ((larger(exponent, one) - 1) << MANTISSA_BITS) + kept;
    if (element.keeps_small) code = larger(code, significand > 0 ? one : zero);
    if (element.is_signed) code |= (code > 0) & (bits < 0) & 0x80;
    return field == FIELD_MASK ? splat(element.not_a_number) : code;
}

// The largest exponent field of a block's finite numbers.
inline int32_t largest_field(const I32 *bits) {
    I32 most = splat(0);
    for (int i = 0; i < BLOCK_PARAMS / LANES; i++) {
        const I32 field = bits[i] >> FRACTION_BITS & FIELD_MASK;
        most = larger(most, field == FIELD_MASK ? splat(0) : field);
    }
    return largest_of<LANES>(most);
}

// first_param: a multiple of BLOCK_PARAMS.
template <Role role>
void encode_blocks(int64_t params, const float *values, int64_t first_param, uint32_t key, uint8_t *codes,
                   uint8_t *scales) {
    constexpr Element element = MX8[role];
    constexpr int vectors = BLOCK_PARAMS / LANES;
    for (int64_t first = 0; first < params; first += BLOCK_PARAMS) {
        I32 bits[vectors], most = splat(0), least = splat(MAGNITUDE_BITS);
        for (int i = 0; i < vectors; i++) {
            bits[i] = load<I32>(values + first + i * LANES);
            most = larger(most, bits[i] & MAGNITUDE_BITS), least = smaller(least, bits[i] & MAGNITUDE_BITS);
        }
        const int32_t largest = largest_of<LANES>(most);
        const bool is_finite = largest < INFINITY_BITS;
        const int32_t field = is_finite ? largest >> FRACTION_BITS : largest_field(bits);
        const int32_t scale = std::max(field, element.least_scale());
        scales[first / BLOCK_PARAMS] = uint8_t(scale);
        const bool is_normal = is_finite && !any_below(least, (scale - element.top + 1) << FRACTION_BITS);
        const int32_t pattern = pattern_of(int32_t(uint64_t(first_param + first) % TILE_PARAMS));
        for (int i = 0; i < vectors; i++) {
            const I32 added = raised_dither(i * LANES, pattern, key);
            const I32 code = is_normal ? encode_normal<role>(bits[i], scale, added)
                                       : encode_any<role>(bits[i], scale, added);
            store(codes + first + i * LANES, bytes_of(code));
        }
    }
}

// fp32 numbers of a part of an array, from `place` on; all but mx8 may have any length.
void decode(const Stored &stored, int64_t place, int64_t params, float *out) {
    if (stored.format == STATE_BF16) {
        const uint16_t *const patterns = (const uint16_t *)stored.elements + place;
        for (int64_t i = 0; i < params; i++) store(out + i, uint32_t(patterns[i]) << 16);
        return;
    }
    const uint8_t *const codes = (const uint8_t *)stored.elements + place, *scales = stored.scales + place / BLOCK_PARAMS;
    stored.role == M ? decode_blocks<M>(params, codes, scales, out) : decode_blocks<V>(params, codes, scales, out);
}

// Parameters of one tile, from first_param of the flat vector on, to `place` of an array.
void encode(const Stored &stored, int64_t place, int64_t params, const float *values, uint32_t step,
            int64_t first_param) {
    const uint32_t key = dither_key(step, stored.role, first_param);
    if (stored.format == STATE_BF16) {
        uint16_t *const patterns = (uint16_t *)stored.elements + place;
        const int64_t whole = params / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
            const I32 bits = (bits_of(load<F32>(values + i)) + dither(first_param + i, key)) >> DITHER_BITS;
            store(patterns + i, words_of(bits));
        }
        for (int64_t i = whole; i < params; i++)
            patterns[i] = uint16_t((load<int32_t>(values + i) + dither(first_param + i, key)[0]) >> DITHER_BITS);
        return;
    }
    uint8_t *const codes = (uint8_t *)stored.elements + place, *scales = stored.scales + place / BLOCK_PARAMS;
    stored.role == M ? encode_blocks<M>(params, values, first_param, key, codes, scales)
                     : encode_blocks<V>(params, values, first_param, key, codes, scales);
}

// fp32 gradients: bf16 ones times a factor, rounded once.
void scale_gradients(const uint16_t *patterns, float scale, int64_t params, float *out) {
    const int64_t whole = params / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, bf16_values(load<U16>(patterns + i)) * scale);
    for (int64_t i = whole; i < params; i++) {
        store(out + i, uint32_t(patterns[i]) << 16);
        out[i] *= scale;
    }
}

// Calls with the place and the number of parameters of each part, none of which reaches over a tile's end.
template <class Call> void for_parts(int64_t params, int64_t first_param, Call call) {
    for (int64_t place = 0; place < params;) {
        const int64_t part = std::min(PART_PARAMS - (first_param + place) % PART_PARAMS, params - place);
        call(place, part);
        place += part;
    }
}

}  // namespace

extern "C" {

// fp32 numbers of a whole array.
void decode_state(const Stored *stored, int64_t params, float *out) { decode(*stored, 0, params, out); }

// Values, the only NaN of which is the canonical one, of the parameters from first_param on, as they are stored.
void encode_state(const Stored *stored, int64_t params, const float *values, uint32_t step, int64_t first_param) {
    for_parts(params, first_param, [&](int64_t place, int64_t part) {
        encode(*stored, place, part, values + place, step, first_param + place);
    });
}

void update_block(const Rule *rule, const Block *block, Counts *counts) {
    const Update update = update_of(*rule);
    const Wide all{block->g, block->p, (float *)block->m, (float *)block->v, block->copy, block->weight, block->rest};
    *counts = {};
    const bool is_wide = rule->state_format == STATE_FP32;
    if (is_wide && !block->g_bf16) return update(*rule, all, block->params, *counts);
    float wide_g[PART_PARAMS], wide_m[PART_PARAMS], wide_v[PART_PARAMS];
    const Stored m{M, rule->state_format, block->m, block->m_scale}, v{V, rule->state_format, block->v, block->v_scale};
    for_parts(block->params, block->first_param, [&](int64_t place, int64_t params) {
        Wide part{all.g + place,    all.p + place,      all.m + place,   all.v + place,
                  all.copy + place, all.weight + place, all.rest + place};
        if (block->g_bf16) {
            scale_gradients(block->g_bf16 + place, block->g_scale, params, wide_g);
            part.g = wide_g;
        }
        if (is_wide) return update(*rule, part, params, *counts);
        if (m.elements) decode(m, place, params, wide_m);
        if (v.elements) decode(v, place, params, wide_v);
        part.m = wide_m, part.v = wide_v;
        update(*rule, part, params, *counts);
        if (m.elements) encode(m, place, params, wide_m, rule->step, block->first_param + place);
        if (v.elements) encode(v, place, params, wide_v, rule->step, block->first_param + place);
    });
}
}
