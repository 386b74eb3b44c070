// Gradients and what was left out of them before to a Top-K stream (nearflash.abi.topk), and what this leaves out, in two
// passes over memory: the first adds and picks what may be kept, the second adds again and packs. Called by loops.py.
//
// Equals the torch code of compressor.py and residual.py to the bit: every operation rounds by itself.

#include <algorithm>
#include <cmath>
#include <vector>

#include "crc32c.hpp"

using namespace nearflash;

// What was left out before, or of this step: values of 4 bits with scales, or numbers; null pointers: nothing.
struct Residual {
    uint8_t *nibbles;
    uint16_t *scales;
    float *numbers;
};

// What came of a range. `nonfinite` gradients: nothing else is there.
struct Outcome {
    int64_t nonfinite, pairs, stream_bytes, words_crc32c;
};

namespace {

constexpr int BLOCK = 16, LARGEST = 7, TILE = 4096, SAMPLED = 251, BUCKETS = 2048, HEADER_BYTES = 32, WORD_BYTES = 8;
constexpr int64_t MARGIN = 22;  // of the sample: with a quarter of its count, five times this one's deviation at 1 %
enum Format { FP32, FP16, BF16 };

using I32x8 = Vector<int32_t, 8>;
using F32x8 = Vector<float, 8>;

inline float number_at(uint16_t bf16) {
    const uint32_t bits = uint32_t(bf16) << 16;
    return load<float>(&bits);
}

inline uint32_t bits_at(float number) { return load<uint32_t>(&number); }

inline uint16_t bf16_of(float number) {
    const uint32_t bits = bits_at(number);
    return uint16_t((bits + (bits >> 16 & 1) + 0x7FFF) >> 16);
}

// Numbers that may be kept, in order, in memory for those of a whole range and a block more.
struct Candidates {
    uint32_t *places;
    float *values;
    int64_t size;

    int32_t magnitude(int64_t i) const { return int32_t(bits_at(values[i]) & MAGNITUDE_BITS); }
};

// Append those of a block whose magnitude is at least `least`; `first` is the place of its first one.
#if defined(NEARFLASH_AVX512)
inline void append(const float *numbers, int32_t least, uint32_t first, Candidates &found) {
    const __m512i bits = load<__m512i>(numbers), magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(MAGNITUDE_BITS));
    const __mmask16 mask = _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(least));
    const I32 places = lane_numbers() + int32_t(first);
    store(found.values + found.size, _mm512_maskz_compress_epi32(mask, bits));
    store(found.places + found.size, _mm512_maskz_compress_epi32(mask, (__m512i)places));
    found.size += __builtin_popcount(mask);
}
#else
inline void append(const float *numbers, int32_t least, uint32_t first, Candidates &found) {
    uint32_t mask = 0;
#if defined(__AVX2__)
    const __m256i below = _mm256_set1_epi32(least - 1), magnitude = _mm256_set1_epi32(MAGNITUDE_BITS);
    for (int i = 0; i < BLOCK; i += 8) {
        const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(load<__m256i>(numbers + i), magnitude), below);
        mask |= uint32_t(_mm256_movemask_ps((__m256)above)) << i;
    }
#else
    for (int i = 0; i < BLOCK; i++) mask |= uint32_t(int32_t(bits_at(numbers[i]) & MAGNITUDE_BITS) >= least) << i;
#endif
    for (; mask; mask &= mask - 1, found.size++) {
        found.places[found.size] = first + __builtin_ctz(mask);
        found.values[found.size] = numbers[__builtin_ctz(mask)];
    }
}
#endif

// The largest magnitude of a block, as an integer; the block times `inverse`, rounded, two values in a byte.
#if defined(__AVX2__)
inline int32_t find_largest(const float *block) {
    const __m256i low = load<__m256i>(block), high = load<__m256i>(block + 8);
    const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE_BITS);
    const __m256i both = _mm256_max_epi32(_mm256_and_si256(low, magnitude), _mm256_and_si256(high, magnitude));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0b01001110));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0b10110001)));
}

// Of eight numbers each pair of values, in the low byte of 64 bits.
inline __m256i pack_pairs(const float *numbers, float inverse) {
    __m256 x = _mm256_mul_ps(load<__m256>(numbers), _mm256_set1_ps(inverse));
    x = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(LARGEST)), _mm256_set1_ps(-LARGEST));
    const __m256i q = _mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(15));
    return _mm256_and_si256(_mm256_or_si256(q, _mm256_srli_epi64(q, 28)), _mm256_set1_epi64x(0xFF));
}

inline uint64_t pack_block(const float *block, float inverse) {
    __m256i bytes = _mm256_packus_epi32(pack_pairs(block, inverse), pack_pairs(block + 8, inverse));
    bytes = _mm256_packus_epi32(bytes, bytes);
    bytes = _mm256_packus_epi16(bytes, bytes);
    const uint64_t low = uint32_t(_mm256_extract_epi32(bytes, 0)), high = uint32_t(_mm256_extract_epi32(bytes, 4));
    return (low & 0xFFFF) | (high & 0xFFFF) << 16 | (low >> 16) << 32 | (high >> 16) << 48;
}
#else
inline int32_t find_largest(const float *block) {
    int32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        const int32_t magnitude = int32_t(bits_at(block[i]) & MAGNITUDE_BITS);
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

inline uint64_t pack_block(const float *block, float inverse) {
    uint64_t packed = 0;
    for (int i = 0; i < BLOCK; i++) {
        float x = block[i] * inverse;
        x = x == x ? x : 0;
        x = x < LARGEST ? x : LARGEST;
        x = x > -LARGEST ? x : -LARGEST;
        packed |= uint64_t(int32_t(__builtin_rintf(x)) & 15) << 4 * i;
    }
    return packed;
}
#endif

// Numbers of a block plus what was left out, which is q · scale.
inline void add_block(const uint8_t *nibbles, uint16_t scale, const float *numbers, float *out) {
    constexpr I32x8 places{28, 24, 20, 16, 12, 8, 4, 0};
    const F32x8 factor = number_at(scale) - F32x8{};
    for (int half = 0; half < 2; half++) {
        const I32x8 q = ((I32x8{} + load<int32_t>(nibbles + 4 * half)) << places) >> 28;
        store(out + 8 * half, __builtin_convertvector(q, F32x8) * factor + load<F32x8>(numbers + 8 * half));
    }
}

// A range whose gradients, and what was left out of it before, are added again and again, where this is needed.
struct Range {
    const float *gradients;
    int64_t params;
    Residual held;

    float at(int64_t place) const {
        if (held.nibbles) {
            const int32_t both = held.nibbles[place / 2];
            const int32_t q = int32_t(uint32_t(both) << (place % 2 ? 24 : 28)) >> 28;
            return float(q) * number_at(held.scales[place / BLOCK]) + gradients[place];
        }
        return held.numbers ? held.numbers[place] + gradients[place] : gradients[place];
    }

    // The sums of [first, first + size), a multiple of BLOCK; in `out` unless there is nothing to add.
    const float *sums(int64_t first, int size, float *out) const {
        const float *const numbers = gradients + first;
        if (held.nibbles)
            for (int i = 0; i < size; i += BLOCK)
                add_block(held.nibbles + (first + i) / 2, held.scales[(first + i) / BLOCK], numbers + i, out + i);
        else if (held.numbers)
            for (int i = 0; i < size; i++) out[i] = held.numbers[first + i] + numbers[i];
        else
            return numbers;
        return out;
    }
};

// A magnitude that a few more numbers have than are sought, from a sample of them; 1 where a sample is none.
int32_t find_likely(const Range &range, int64_t count) {
    const int64_t size = (range.params + SAMPLED - 1) / SAMPLED, likely = 5 * count / (4 * SAMPLED) + MARGIN;
    if (likely >= size) return 1;
    std::vector<int32_t> sample(size);
    for (int64_t i = 0; i < size; i++) sample[i] = int32_t(bits_at(range.at(i * SAMPLED)) & MAGNITUDE_BITS);
    std::nth_element(sample.begin(), sample.begin() + likely, sample.end(), std::greater<int32_t>());
    return std::min(std::max(sample[likely], 1), INFINITY_BITS);
}

// All numbers whose magnitude, as an integer, is at least `least`, which is at least 1.
void find_large(const Range &range, int32_t least, Candidates &found) {
    float memory[TILE];
    found.size = 0;
    for (int64_t first = 0; first < range.params; first += TILE) {
        const int size = int(std::min<int64_t>(TILE, range.params - first));
        const float *const sums = range.sums(first, size, memory);
        for (int i = 0; i < size; i += BLOCK) append(sums + i, least, uint32_t(first + i), found);
    }
}

// The magnitude that `count` of the candidates have or exceed: of the bucket that it is in, the rest is sorted out.
int32_t find_least(const Candidates &found, int64_t count) {
    int32_t most = 0, fewest = INFINITY_BITS;
    for (int64_t i = 0; i < found.size; i++) {
        most = std::max(most, found.magnitude(i));
        fewest = std::min(fewest, found.magnitude(i));
    }
    int shift = 0;
    while ((most - fewest) >> shift >= BUCKETS) shift++;
    std::vector<int64_t> counts(BUCKETS);
    for (int64_t i = 0; i < found.size; i++) counts[(found.magnitude(i) - fewest) >> shift]++;
    int bucket = BUCKETS - 1;
    for (; counts[bucket] < count; bucket--) count -= counts[bucket];
    std::vector<int32_t> inside;
    for (int64_t i = 0; i < found.size; i++)
        if ((found.magnitude(i) - fewest) >> shift == bucket) inside.push_back(found.magnitude(i));
    std::nth_element(inside.begin(), inside.begin() + count - 1, inside.end(), std::greater<int32_t>());
    return inside[count - 1];
}

// Leave the `count` of largest magnitude, the lower place of equal ones, in order.
void keep_largest(Candidates &found, int64_t count) {
    if (found.size <= count) return;
    const int32_t least = find_least(found, count);
    int64_t equal = count, kept = 0;
    for (int64_t i = 0; i < found.size; i++) equal -= found.magnitude(i) > least;
    for (int64_t i = 0; i < found.size; i++) {
        const bool same = found.magnitude(i) == least, keeps = (found.magnitude(i) > least) | (same & (equal > 0));
        equal -= same;
        found.places[kept] = found.places[i];
        found.values[kept] = found.values[i];
        kept += keeps;
    }
    found.size = kept;
}

// A value as a stream has it, its largest number in the place of a larger one; and what that is worth.
template <int format> inline uint32_t pattern_of(float value) {
    if (format == FP32) return bits_at(value);
    const float most = format == FP16 ? 65504.0f : number_at(0x7F7F);
    const float within = value > most ? most : value < -most ? -most : value;
    if (format == BF16) return bf16_of(within);
    const U16 patterns = fp16_patterns(splat(within));
    return patterns[0];
}

template <int format> inline float value_of(uint32_t pattern) {
    if (format == FP32) return load<float>(&pattern);
    if (format == BF16) return number_at(uint16_t(pattern));
    const F32 values = fp16_values(U16{} + uint16_t(pattern));
    return values[0];
}

uint8_t *pad(uint8_t *at, const uint8_t *section) {
    while ((at - section) % WORD_BYTES) *at++ = 0;
    return at;
}

// Candidates of a tile.
struct Kept {
    const uint32_t *places;
    float *values;
    int count;
};

// A tile's word and sections, behind each other; returns where they end. The values as sent take the place of others.
template <int format> uint8_t *write_tile(int64_t tile, const Kept &kept, uint8_t *word) {
    uint8_t *const indices = word + WORD_BYTES, *at = indices;
    for (int i = 0; i < kept.count; i++) store(at + 2 * i, uint16_t(kept.places[i] % TILE));
    at = pad(at + 2 * kept.count, indices);
    const uint8_t *const values = at;
    constexpr int size = format == FP32 ? 4 : 2;
    for (int i = 0; i < kept.count; i++) {
        const uint32_t pattern = pattern_of<format>(kept.values[i]);
        std::memcpy(at + size * i, &pattern, size);
        kept.values[i] = value_of<format>(pattern);
    }
    at += size * kept.count;
    at = pad(at, values);
    const uint32_t before = InstructionStep::step(~0u, uint64_t(tile) | uint64_t(kept.count) << 32);
    const uint64_t crc = Checksum<InstructionStep>::of(indices, at - indices, before);
    store(word, uint64_t(kept.count) | crc << 32);
    return at;
}

// What the kept ones leave of a tile's sums, as it will be held.
void pack_tile(const Range &range, int64_t first, int size, const Kept &kept, const Residual &left) {
    float memory[TILE];
    const float *const sums = range.sums(first, size, memory);
    float *const rest = left.numbers ? left.numbers + first : memory;
    if (rest != sums) std::memcpy(rest, sums, size * sizeof *rest);
    for (int i = 0; i < kept.count; i++) rest[kept.places[i] - first] -= kept.values[i];
    if (left.numbers) return;
    // Divisions of a tile's blocks stand side by side.
    float scales[TILE / BLOCK];
    const int blocks = size / BLOCK;
    for (int i = 0; i < blocks; i++) {
        const int32_t most = find_largest(rest + i * BLOCK);
        scales[i] = load<float>(&most);
    }
    for (int i = 0; i < blocks; i++) {
        const uint16_t scale = bf16_of(scales[i] / LARGEST);
        left.scales[first / BLOCK + i] = scale;
        scales[i] = scale ? 1 / number_at(scale) : 0;
    }
    for (int i = 0; i < blocks; i++)
        store(left.nibbles + (first + i * BLOCK) / 2, pack_block(rest + i * BLOCK, scales[i]));
}

}  // namespace

extern "C" {

// The stream of a range of `params` gradients, a multiple of BLOCK, without its header, for which room is left in front;
// what is left out of it, where this is held. memory: for two words a gradient, and 32 more.
void compress(const float *gradients, int64_t params, int64_t count, int format, const Residual *held,
              const Residual *left, uint8_t *memory, uint8_t *stream, Outcome *outcome) {
    const Range range{gradients, params, *held};
    uint32_t *const places = (uint32_t *)memory;
    Candidates found{places, (float *)(places + params + BLOCK), 0};
    const int32_t likely = find_likely(range, count);
    find_large(range, likely, found);
    if (found.size < count && likely > 1) find_large(range, 1, found);
    *outcome = {};
    for (int64_t i = 0; i < found.size; i++) outcome->nonfinite += found.magnitude(i) >= INFINITY_BITS;
    if (outcome->nonfinite) return;
    keep_largest(found, count);
    const auto write = format == FP32 ? write_tile<FP32> : format == FP16 ? write_tile<FP16> : write_tile<BF16>;
    uint8_t *at = stream + HEADER_BYTES;
    uint32_t words = ~0u;
    const bool holds = left->nibbles || left->numbers;
    for (int64_t first = 0, done = 0; first < params; first += TILE) {
        const int size = int(std::min<int64_t>(TILE, params - first));
        Kept kept{found.places + done, found.values + done, 0};
        while (done < found.size && found.places[done] < first + size) done++, kept.count++;
        uint8_t *const word = at;
        at = write(first / TILE, kept, word);
        words = InstructionStep::step(words, load<uint64_t>(word));
        if (holds) pack_tile(range, first, size, kept, *left);
    }
    outcome->pairs = found.size;
    outcome->stream_bytes = at - stream;
    outcome->words_crc32c = ~words;
}
}
