// Attention on the CPU: the choice of tokens by their scores, and the sums over K and V as they lie.
//
//     index rows, K of the suffix ─► logits ─► keys of entries ─► chosen entries
//     chosen tokens' K ─► logits ─► weights ─► sums of V, tile by tile; then divided
//
// Called by kernels.py and scoring.py. Arrays are C-contiguous. Letters: H KV heads, g query heads of a KV head, d head
// dimension, r dims of the score, S tokens, E entries, B index blocks of T tokens.
//
// Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867).

#include <cmath>
#include <vector>

#include "attention.hpp"

using namespace nearflash;

// q of heads in one attention, and what it has come to: `largest` and `total` (H, g), out (H, g, d), not divided yet.
struct Running {
    int64_t heads, group, dim;
    const float *q;  // scaled
    float *largest, *total, *out;
    float softcap;  // 0: none
};

// A layer's tokens, all of them in memory: K and V (H, T, d) fp16, heads `between` elements apart, tokens `stride`.
struct Memory {
    int64_t heads, group, dim, tokens, between, stride;
    const uint16_t *q, *keys, *values;
    float scaling, softcap;
    const float *sinks;  // (H, g), or null: none
    float *out;
};

// KV page groups of `each` tokens, `elements` each, flat in `kept` and, others, in `fresh`, which has `early` of them,
// and `late`: those of head h end at ends[h] in `places` (the place in kept, or -1 - that in fresh and, behind it, late)
// and `numbers` (which groups). V is `v_from` behind K.
struct PageGroups {
    const uint16_t *kept, *fresh, *late;
    const int64_t *places, *numbers, *ends;
    int64_t early, elements, v_from, stride, each;
    const uint8_t *chosen;  // (H, S), or null: all tokens count
    int64_t tokens;         // S

    // The elements from kept, or else from fresh, up to a place.
    int64_t at(int64_t place) const {
        if (place >= 0) return place * elements;
        const int64_t row = -1 - place;
        if (row < early) return row * elements;
        return int64_t(uintptr_t(late) - uintptr_t(fresh)) / int64_t(sizeof *late) + (row - early) * elements;
    }
};

// Tokens of heads in memory, (all heads, u, d), the heads so many elements apart, and what ends their attention.
struct Suffixes {
    const int64_t *heads;
    int64_t tokens, k_between, v_between;
    const uint16_t *keys, *values;
    const uint8_t *chosen;         // (H, u), or null: all count
    const float *sinks;            // (all heads, g), or null: none
    const float *alpha, *v_mean;  // (H, g): share of the chosen tokens in the softmax over all; (all heads, d)
};

// Index blocks (H, B, R, T·bits/8) of int4 (the lower nibble first), int8 or fp16 numbers, and each row's fp16 scale
// and zero (H, B, R, 2), unused for fp16; K (H, t, d) of the tokens after the `covered` ones of the index.
struct Index {
    int64_t heads, blocks, lines, length, bits, covered, suffix_tokens, suffix_between;
    const uint8_t *codes;
    const uint16_t *factors, *suffix;
    const int64_t *rows;  // (H, r), which of R
};

// How entries of `each` tokens are chosen.
struct Choice {
    int64_t group, dim, score_dims, each, entries, window, top_k, top_p;
    int32_t by_probability;
    float scaling, softcap;
    const float *q;       // (H, g, d)
    const int64_t *dims;  // (H, r)
    float *scores;        // room for (g, S)
    int32_t *counts;      // (2^16,) zeros, and zeros again afterwards
    uint8_t *taken;       // (H, E)
    float *alpha;         // (H, g)
};

namespace {

constexpr int TILE = 128;  // tokens whose logits are held at once
constexpr int BINS = 1 << 16;

// Runs of `each` tokens: of run j token t has its K at k_at[j] + t·stride of `keys`, V alike.
struct Runs {
    const uint16_t *keys, *values;
    const int64_t *k_at, *v_at;
    int64_t count, each, stride;
    const uint8_t *const *chosen;  // of each run, which tokens count; null: all
};

// Attention of one KV head: q and out with zeros up to a number of vectors.
class Head {
  public:
    Head(const float *q, int64_t group, int64_t dim, float softcap, float *largest, float *total, float *out)
        : group(group), dim(dim), padded((dim + LANES - 1) / LANES * LANES), softcap(softcap), largest(largest),
          total(total), out(out), wide_q(group * padded), sums(group * padded), logits(group * TILE),
          tile(padded == dim ? 0 : TILE * padded) {
        for (int64_t a = 0; a < group; a++) {
            std::copy_n(q + a * dim, dim, &wide_q[a * padded]);
            std::copy_n(out + a * dim, dim, &sums[a * padded]);
        }
    }

    ~Head() {
        for (int64_t a = 0; a < group; a++) std::copy_n(&sums[a * padded], dim, out + a * dim);
    }

    void attend(const Runs &runs) {
        for (int64_t run = 0; run < runs.count; run++)
            for (int64_t begin = 0; begin < runs.each; begin += TILE) attend_tile(runs, run, begin);
    }

  private:
    void attend_tile(const Runs &runs, int64_t run, int64_t begin) {
        const int64_t size = std::min<int64_t>(TILE, runs.each - begin), stride = runs.stride;
        const uint8_t *const chosen = runs.chosen ? runs.chosen[run] + begin : nullptr;
        const int64_t taken = chosen ? std::count(chosen, chosen + size, 1) : size;
        if (!taken) return;
        const uint16_t *const k = runs.keys + runs.k_at[run] + begin * stride;
        const uint16_t *ahead = k + TILE * stride;
        if (begin + TILE >= runs.each) ahead = run + 1 < runs.count ? runs.keys + runs.k_at[run + 1] : k;
        if (padded == dim)
            find_logits(k, stride, ahead, size);
        else
            find_logits(copy_tile(k, stride, size), padded, tile.data(), size);
        if (taken < size)
            for (int64_t t = 0; t < size; t++)
                for (int64_t a = 0; a < group && !chosen[t]; a++) logits[a * TILE + t] = LOWEST;
        soften(size);
        const uint16_t *const v = runs.values + runs.v_at[run] + begin * stride;
        if (padded == dim)
            add_taken(v, stride, size, taken, chosen);
        else
            add_taken(copy_tile(v, stride, size), padded, size, taken, chosen);
    }

    const uint16_t *copy_tile(const uint16_t *from, int64_t stride, int64_t size) {
        for (int64_t t = 0; t < size; t++) std::copy_n(from + t * stride, dim, &tile[t * padded]);
        return tile.data();
    }

    // Of `size` tokens of `keys`; `ahead`: where what is wanted next begins.
    void find_logits(const uint16_t *keys, int64_t stride, const uint16_t *ahead, int64_t size) {
        for (int64_t first = 0, heads; first < group; first += heads) {
            heads = heads_at_once(group - first);
            const float *const q = &wide_q[first * padded];
            float *const to = &logits[first * TILE];
            with_heads(int(heads), [&](auto count) {
                int64_t t = 0;
                for (; t + LANES <= size; t += LANES) {
                    for (int64_t line = 0; !first && line < LANES * stride; line += 32)
                        __builtin_prefetch(ahead + t * stride + line, 0, 2);
                    dots<count>(q, padded, keys + t * stride, stride, to + t, TILE);
                }
                for (; t + KEYS <= size; t += KEYS) few_dots<count>(q, padded, keys + t * stride, stride, to + t, TILE);
                for (; t < size; t++)
                    for (int head = 0; head < count; head++)
                        to[head * TILE + t] = dot_half(q + head * padded, keys + t * stride, padded);
            });
        }
    }

    // Weights e^(logit - largest) in place of logits; the sums follow.
    void soften(int64_t size) {
        for (int64_t a = 0; a < group; a++) {
            float *const own = &logits[a * TILE];
            for (int64_t t = 0; softcap > 0 && t < size; t++)
                if (own[t] > LOWEST) own[t] = softcap * std::tanh(own[t] / softcap);
            const float most = find_largest(own, size, largest[a]);
            if (most > largest[a]) {
                const float kept = exp_of(splat(std::max(largest[a] - most, -88.0f)))[0];
                scale(kept, &sums[a * padded], padded);
                total[a] *= kept;
                largest[a] = most;
            }
            total[a] += sum_exponentials<true>(own, size, 1.0f, most);
        }
    }

    void add_taken(const uint16_t *values, int64_t stride, int64_t size, int64_t taken, const uint8_t *chosen) {
        if (taken == size) return add(0, values, stride, size);
        for (int64_t t = 0; t < size; t++)
            if (chosen[t]) add(t, values + t * stride, stride, 1);
    }

    // V of `count` tokens from token t on, by their weights.
    void add(int64_t t, const uint16_t *values, int64_t stride, int64_t count) {
        for (int64_t first = 0, heads; first < group; first += heads) {
            heads = heads_at_once(group - first);
            const float *const weights = &logits[first * TILE + t];
            with_heads(int(heads), [&](auto some) {
                int64_t at = 0;
                float *const to = &sums[first * padded];
                for (; at + 4 * LANES <= padded; at += 4 * LANES)
                    add_values<some, 4>(weights, TILE, values + at, stride, count, to + at, padded);
                for (; at + 2 * LANES <= padded; at += 2 * LANES)
                    add_values<some, 2>(weights, TILE, values + at, stride, count, to + at, padded);
                for (; at < padded; at += LANES)
                    add_values<some, 1>(weights, TILE, values + at, stride, count, to + at, padded);
            });
        }
    }

    const int64_t group, dim, padded;
    const float softcap;
    float *const largest, *const total, *const out;
    std::vector<float> wide_q, sums, logits;
    std::vector<uint16_t> tile;
};

// The output: divided, mixed with the mean of V where alpha < 1, sinks counted (logits without a value; null: none).
void finish(int64_t group, int64_t dim, const float *sinks, const float *alpha, const float *v_mean,
            const float *largest, const float *total, float *out) {
    for (int64_t a = 0; a < group; a++) {
        const float over = 1.0f / total[a], share = alpha ? alpha[a] : 1.0f;
        float *const own = out + a * dim;
        for (int64_t i = 0; i < dim; i++) own[i] = share * (own[i] * over) + (alpha ? (1.0f - share) * v_mean[i] : 0.0f);
        if (!sinks) continue;
        // The sum over all tokens is total / share.
        const float gap = largest[a] + std::log(total[a]) - std::log(share) - sinks[a];
        scale(1.0f / (1.0f + std::exp(-gap)), own, dim);
    }
}

// Weights of a block: q (g, r) times each row's scale, and base (g,): the sums of q times the rows' zeros.
void weigh_rows(const float *q, int64_t group, int64_t dims, const uint16_t *factors, const int64_t *rows, int64_t bits,
                float *weights, float *base) {
    std::fill_n(base, group, 0.0f);
    for (int64_t j = 0; j < dims; j++) {
        const bool coded = bits != 16;
        const float factor = coded ? fp16_value(factors[2 * rows[j]]) : 1.0f;
        const float zero = coded ? fp16_value(factors[2 * rows[j] + 1]) : 0.0f;
        for (int64_t a = 0; a < group; a++) {
            weights[a * dims + j] = q[a * dims + j] * factor;
            base[a] += q[a * dims + j] * zero;
        }
    }
}

// Scores (g, width) of the tokens of whole index blocks.
template <int bits>
void score_blocks(const float *q, int64_t group, int64_t blocks, int64_t lines, IndexRows index,
                  const uint16_t *factors, float *scores, int64_t width) {
    const int64_t tokens = index.length * 8 / bits, whole = tokens / ROW_TOKENS * ROW_TOKENS, dims = index.dims;
    constexpr int few = loaded<bits>, few_tokens = few * LANES;
    std::vector<float> weights(group * dims), base(group);
    index.ahead = lines * index.length;
    for (int64_t block = 0; block < blocks; block++, factors += 2 * lines, scores += tokens) {
        weigh_rows(q, group, dims, factors, index.rows, bits, weights.data(), base.data());
        const uint8_t *const codes = index.codes + block * lines * index.length;
        for (int64_t first = 0, heads; first < group; first += heads) {
            heads = heads_at_once(group - first);
            const float *const own = &weights[first * dims], *const zeros = &base[first];
            float *const to = scores + first * width;
            with_heads(int(heads), [&](auto count) {
                int64_t t = 0;
                for (; t < whole; t += ROW_TOKENS)
                    score_rows<bits, count, SUMS>(index, codes + t * bits / 8, own, zeros, to + t, width);
                for (; t + few_tokens <= tokens; t += few_tokens)
                    score_rows<bits, count, few>(index, codes + t * bits / 8, own, zeros, to + t, width);
                if (const int64_t bytes = index.length - t * bits / 8)
                    score_rows<bits, count, few, true>(index, codes + t * bits / 8, own, zeros, to + t, width, bytes);
            });
        }
    }
}

// Scores (g, width) of tokens from `first` on with fp16 keys (t, d): q (g, d), 0 outside the score's dims.
void score_keys(const float *q, int64_t group, int64_t dim, const uint16_t *keys, int64_t count, int64_t first,
                float *scores, int64_t width) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t a = 0; a < group; a++)
            scores[a * width + first + t] = dot_half(q + a * dim, keys + t * dim, dim);
}

// shares (g, E): probabilities of entries, by the softmax of factors (g,) times scores (g, S), which are others
// afterwards. keys (E,): 2^12 times the entry's probability, summed over query heads; else the largest logits' sum, in
// powers of 2.
void weigh(const Choice &choice, float *scores, int64_t tokens, const float *factors, float *keys, float *shares) {
    const int64_t entries = choice.entries, each = choice.each;
    std::fill_n(keys, entries, 0.0f);
    for (int64_t a = 0; a < choice.group; a++, scores += tokens, shares += entries) {
        float factor = factors[a];
        if (choice.softcap > 0) {
            for (int64_t t = 0; t < tokens; t++)
                scores[t] = choice.softcap * std::tanh(scores[t] * factor / choice.softcap);
            factor = 1.0f;
        }
        if (factor < 0) {
            scale(factor, scores, tokens);
            factor = 1.0f;
        }
        const auto count_of = [&](int64_t e) { return std::min(each, tokens - e * each); };
        if (!choice.by_probability)
            for (int64_t e = 0; e < entries; e++)
                keys[e] += factor * find_largest(scores + e * each, count_of(e), LOWEST) * LOG2E;
        const float most = factor * find_largest(scores, tokens, LOWEST);
        float total = 0.0f;
        if (each < LANES) {
            total = sum_exponentials<true>(scores, tokens, factor, most);
            for (int64_t e = 0; e < entries; e++) {
                shares[e] = 0.0f;
                for (int64_t t = e * each; t < e * each + count_of(e); t++) shares[e] += scores[t];
            }
        } else {
            const int64_t together = each % LANES ? 0 : tokens / each / LANES * LANES;
            for (int64_t e = 0; e < together; e += LANES) {
                const F32 sums = sum_entries(scores + e * each, each / LANES, factor, most);
                store(shares + e, sums);
                total += sum_of(sums);
            }
            for (int64_t e = together; e < entries; e++) {
                shares[e] = sum_exponentials<false>(scores + e * each, count_of(e), factor, most);
                total += shares[e];
            }
        }
        const float over = 1.0f / total;
        for (int64_t e = 0; e < entries; e++) {
            shares[e] *= over;
            if (choice.by_probability) keys[e] += 4096.0f * shares[e];
        }
    }
}

// Rises with the number of an fp16 pattern; and the pattern again.
inline int32_t order_of(int32_t pattern) { return pattern & 0x8000 ? pattern ^ 0xFFFF : pattern | 0x8000; }
inline float value_of(int32_t order) { return fp16_value(uint16_t(order & 0x8000 ? order ^ 0x8000 : order ^ 0xFFFF)); }

// The last entry's order that is taken, and how many of that order are.
struct Last {
    int32_t order;
    int64_t count;
};

// From the largest key down: `left` entries, or as many as `needed` wants where top_p is given.
Last find_last(const int32_t *counts, int32_t low, int32_t high, int64_t left, bool by_share, double reached,
               double needed) {
    Last last{BINS, 0};
    if (left <= 0 || (by_share && reached >= needed)) return last;
    for (int32_t order = high; order >= low; order--) {
        if (!counts[order]) continue;
        last = {order, std::min<int64_t>(left, counts[order])};
        left -= last.count;
        reached += counts[order] * double(value_of(order));
        if (!left || (by_share && reached >= needed)) break;
    }
    return last;
}

// Which entries are taken (E,), and alpha (g,): the sum of their shares (g, E).
//
// Entries that hold one of the last `window` tokens come first, then those with the largest fp16 key, the lower index
// first among equals: `top_k` of them; with top_p (2^-16) as many as hold that share of the keys, all with the last key
// needed, at most `top_k`.
void choose(const Choice &choice, int64_t tokens, const float *keys, const float *shares, uint8_t *taken, float *alpha) {
    const int64_t entries = choice.entries, each = choice.each;
    const int64_t first_local = std::min(entries, std::max<int64_t>(tokens - choice.window, 0) / each);
    std::vector<int32_t> orders(entries + LANES);
    for (int64_t e = 0; e < entries; e += LANES) {
        const int64_t count = std::min<int64_t>(LANES, entries - e);
        const I32 patterns = widen(fp16_patterns(load_some<F32>(keys + e, 4 * count)));
        store(&orders[e], (patterns & 0x8000) != 0 ? patterns ^ 0xFFFF : patterns | 0x8000);
    }
    double total = 0.0, reached = 0.0;
    int32_t low = BINS, high = 0;
    for (int64_t e = 0; e < entries; e++) {
        const double rounded = value_of(orders[e]);
        total += rounded;
        if (e >= first_local) {
            reached += rounded;
        } else {
            choice.counts[orders[e]]++;
            low = std::min(low, orders[e]), high = std::max(high, orders[e]);
        }
    }
    const int64_t left = choice.top_k - (entries - first_local);
    Last last = find_last(choice.counts, low, high, left, choice.top_p, reached, choice.top_p / 65536.0 * total);
    for (int64_t e = 0; e < entries; e++) {
        taken[e] = e >= first_local || orders[e] > last.order;
        if (e < first_local) choice.counts[orders[e]] = 0;
        if (e < first_local && orders[e] == last.order && last.count) taken[e] = true, last.count--;
    }
    for (int64_t a = 0; a < choice.group; a++) {
        alpha[a] = 0.0f;
        for (int64_t e = 0; e < entries; e++)
            if (taken[e]) alpha[a] += shares[a * entries + e];
    }
}

// q (g, d) in the score's dims alone: together (g, r), and in their places, 0 elsewhere. A score is a logit when it is
// multiplied by the scaling and by the root of |q| over that of these dims.
void split_query(const Choice &choice, const float *q, const int64_t *dims, float *near, float *partly, float *scales) {
    std::fill_n(partly, choice.group * choice.dim, 0.0f);
    for (int64_t a = 0; a < choice.group; a++, q += choice.dim, partly += choice.dim, near += choice.score_dims) {
        float every = 0.0f, chosen = 0.0f;
        for (int64_t i = 0; i < choice.dim; i++) every += std::abs(q[i]);
        for (int64_t j = 0; j < choice.score_dims; j++) {
            near[j] = partly[dims[j]] = q[dims[j]];
            chosen += std::abs(near[j]);
        }
        scales[a] = chosen > 0 ? choice.scaling * std::sqrt(every / chosen) : choice.scaling;
    }
}

void score_index(const Index &index, int64_t head, const float *q, int64_t group, int64_t dims, float *scores,
                 int64_t width) {
    const int64_t own = head * index.blocks * index.lines;
    const IndexRows rows{index.codes + own * index.length, index.length, dims, 0, index.rows + head * dims};
    const uint16_t *const factors = index.factors + 2 * own;
    const auto score = index.bits == 4 ? score_blocks<4> : index.bits == 8 ? score_blocks<8> : score_blocks<16>;
    score(q, group, index.blocks, index.lines, rows, factors, scores, width);
}

}  // namespace

extern "C" {

void attend_memory(const Memory *x) {
    const int64_t group = x->group, dim = x->dim, own = group * dim, zero = 0;
    std::vector<float> q(own), largest(group), total(group);
    for (int64_t head = 0; head < x->heads; head++) {
        for (int64_t i = 0; i < own; i++) q[i] = x->scaling * fp16_value(x->q[head * own + i]);
        std::fill(largest.begin(), largest.end(), LOWEST);
        std::fill(total.begin(), total.end(), 0.0f);
        float *const out = x->out + head * own;
        std::fill_n(out, own, 0.0f);
        const int64_t at = head * x->between;
        Head(q.data(), group, dim, x->softcap, largest.data(), total.data(), out)
            .attend({x->keys + at, x->values + at, &zero, &zero, 1, x->tokens, x->stride, nullptr});
        finish(group, dim, x->sinks ? x->sinks + head * group : nullptr, nullptr, nullptr, largest.data(), total.data(),
               out);
    }
}

// Go on with attentions over page groups.
void attend_groups(const Running *x, const PageGroups *groups) {
    std::vector<int64_t> k_at, v_at;
    std::vector<const uint8_t *> chosen;
    int64_t begin = 0;
    for (int64_t head = 0; head < x->heads; begin = groups->ends[head++]) {
        const int64_t row = head * x->group;
        Head own(x->q + row * x->dim, x->group, x->dim, x->softcap, x->largest + row, x->total + row,
                 x->out + row * x->dim);
        for (const bool fresh : {false, true}) {
            k_at.clear(), v_at.clear(), chosen.clear();
            for (int64_t i = begin; i < groups->ends[head]; i++) {
                const int64_t place = groups->places[i];
                if ((place < 0) != fresh) continue;
                k_at.push_back(groups->at(place));
                v_at.push_back(k_at.back() + groups->v_from);
                chosen.push_back(groups->chosen + head * groups->tokens + groups->numbers[i] * groups->each);
            }
            const uint16_t *const data = fresh ? groups->fresh : groups->kept;
            own.attend({data, data, k_at.data(), v_at.data(), int64_t(k_at.size()), groups->each, groups->stride,
                        groups->chosen ? chosen.data() : nullptr});
        }
    }
}

// End attentions with the tokens in memory.
void attend_suffixes(const Running *x, const Suffixes *suffixes) {
    for (int64_t own = 0; own < x->heads; own++) {
        const int64_t head = suffixes->heads[own], row = own * x->group, tokens = suffixes->tokens;
        const int64_t k_at = head * suffixes->k_between, v_at = head * suffixes->v_between;
        float *const out = x->out + row * x->dim;
        const uint8_t *const chosen = suffixes->chosen ? suffixes->chosen + own * tokens : nullptr;
        Head(x->q + row * x->dim, x->group, x->dim, x->softcap, x->largest + row, x->total + row, out)
            .attend({suffixes->keys, suffixes->values, &k_at, &v_at, 1, tokens, x->dim, chosen ? &chosen : nullptr});
        finish(x->group, x->dim, suffixes->sinks ? suffixes->sinks + head * x->group : nullptr, suffixes->alpha + row,
               suffixes->v_mean + head * x->dim, x->largest + row, x->total + row, out);
    }
}

// Which entries of heads are taken, one head after the other: scores by index and suffix, `weigh`, `choose`.
void choose_heads(const Choice *choice, const Index *index) {
    const int64_t group = choice->group, dim = choice->dim, dims = choice->score_dims;
    const int64_t tokens = index->covered + index->suffix_tokens;
    std::vector<float> near(group * dims), partly(group * dim), scales(group), keys(choice->entries),
        shares(group * choice->entries);
    for (int64_t head = 0; head < index->heads; head++) {
        split_query(*choice, choice->q + head * group * dim, choice->dims + head * dims, near.data(), partly.data(),
                    scales.data());
        score_index(*index, head, near.data(), group, dims, choice->scores, tokens);
        score_keys(partly.data(), group, dim, index->suffix + head * index->suffix_between, index->suffix_tokens,
                   index->covered, choice->scores, tokens);
        weigh(*choice, choice->scores, tokens, scales.data(), keys.data(), shares.data());
        choose(*choice, tokens, keys.data(), shares.data(), choice->taken + head * choice->entries,
               choice->alpha + head * group);
    }
}

// Whether no fp16 number is an infinity or NaN.
int32_t are_finite(const uint16_t *patterns, int64_t count) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong += (patterns[i] & 0x7C00) == 0x7C00;
    return wrong == 0;
}
}
