// Expander<TopK, Lanes>: a Top-K gradient stream to dense fp32 gradients (docs/contracts/gradients.md).
//
//     64-bit words ─► parse (checks; one pair a cycle) ─► pairs ─► scatter (two tile buffers) ─► words of Lanes
//
// While one tile is filled the one before it is written out and cleared behind, so that pairs are free up to 1/Lanes of
// the density. Faults are the contract's (nearflash.abi.topk, StreamFault); the first ends the stream: parameters after
// it are zero, and what was made must not be used.
#pragma once

#include <cstdint>

#include "nearflash/expander.hpp"
#include "nearflash/memory.hpp"
#include "nearflash/real.hpp"

namespace nearflash {

struct TopK {
    static constexpr std::uint32_t magic = 0x4b54464eu;  // "NFTK"
    static constexpr std::uint32_t version = 1, tile_bits = 12, tile_params = 1u << tile_bits;

    enum class Fault : std::uint32_t { none, header, length, count, checksum, order, range };

    // A parameter's gradient, or the end of a tile.
    struct Pair {
        std::uint32_t value;  // fp32 pattern
        std::uint16_t index;  // in the tile
        bool end;
    };
};

// CRC32C of a message's next `bytes` (4 or 8) in `word`, first byte lowest; the register is not inverted here.
inline std::uint32_t crc32c(std::uint32_t crc, std::uint64_t word, int bytes = 8) {
#pragma HLS INLINE
    for (int bit = 0; bit < 8 * bytes; ++bit) {
#pragma HLS UNROLL
        const bool one = (crc ^ std::uint32_t(word >> bit)) & 1;
        crc = (crc >> 1) ^ (one ? 0x82f63b78u : 0u);
    }
    return crc;
}

// fp32 pattern of a value in the stream's format (0 fp32, 1 fp16, 2 bf16); exact, a NaN keeps its payload.
inline std::uint32_t widen(std::uint32_t bits, std::uint32_t format) {
#pragma HLS INLINE
    if (format == 0) return bits;
    if (format == 2) return bits << 16;
    const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return sign | 0x7f800000u | mantissa << 13;
    if (exponent != 0) return sign | (exponent + 112) << 23 | mantissa << 13;
    if (mantissa == 0) return sign;
    const std::uint32_t places = __builtin_clz(mantissa) - 21;  // the leading one to bit 10
    return sign | (113 - places) << 23 | ((mantissa << places) & 1023) << 13;
}

template <int Lanes>
struct Expander<TopK, Lanes> {
    using Fault = TopK::Fault;
    using Pair = TopK::Pair;
    using Word = Pack<Real, Lanes>;
    using In = Stream<Pack<std::uint64_t, 1>>;
    static_assert(TopK::tile_params % Lanes == 0, "Lanes must divide a tile");

    // `bytes` of stream in, in `words` words with what lies behind; pairs tile by tile out. All words are read whatever
    // the fault.
    static void parse(In& in, std::uint32_t words, std::uint32_t bytes, std::uint32_t params, Stream<Pair, 4096>& out,
                      std::uint32_t* fault) {
        const std::uint32_t tiles = ceil_div(params, TopK::tile_params), behind = words - bytes / 8;
        std::uint32_t left = bytes / 8, format = 0, pairs = 0, pairs_said = 0;
        Fault found = header(in, left, bytes, params, tiles, format, pairs_said);
        // Invariant: before tile t, every tile below t has ended in `out`; `left` words of the stream are unread.
        for (std::uint32_t t = 0; t < tiles; ++t) {
            const std::uint32_t first = t * TopK::tile_params, rest = params - first;
            if (found == Fault::none)
                found = tile(in, left, t, rest < TopK::tile_params ? rest : TopK::tile_params, format, out, pairs);
            out.write({0, 0, true});
        }
        if (found == Fault::none && (left != 0 || bytes % 8 != 0 || pairs != pairs_said)) found = Fault::length;
        for (left += behind; left > 0; --left) {
#pragma HLS PIPELINE II = 1
            in.read();
        }
        *fault = std::uint32_t(found);
    }

    // Pairs in, `words` words of dense gradients out.
    static void scatter(Stream<Pair, 4096>& in, std::uint32_t params, std::uint32_t words, Stream<Word>& out) {
        constexpr std::uint32_t tile_words = TopK::tile_params / Lanes;
        const std::uint32_t tiles = ceil_div(params, TopK::tile_params);
        std::uint32_t tile_buffer[2][TopK::tile_params] = {};
#pragma HLS ARRAY_PARTITION variable = tile_buffer dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = tile_buffer dim = 2 cyclic factor = Lanes
        // Invariant: before step t, tile t - 1 lies in buffer (t - 1) mod 2, the other is zero, tiles [0, t - 1) are out.
        for (std::uint32_t t = 0; t <= tiles; ++t) {
            const std::uint32_t rest = t == 0 ? 0 : words - (t - 1) * tile_words;
            const std::uint32_t ready = rest < tile_words ? rest : tile_words;
            bool filled = t == tiles;
            for (std::uint32_t i = 0; !filled || i < ready; ++i) {
#pragma HLS PIPELINE II = 1
                if (!filled) {
                    const Pair pair = in.read();
                    if (pair.end)
                        filled = true;
                    else
                        tile_buffer[t % 2][pair.index % TopK::tile_params] = pair.value;
                }
                if (i < ready) out.write(take(tile_buffer[(t + 1) % 2], i));
            }
        }
    }

  private:
    static Word take(std::uint32_t (&tile)[TopK::tile_params], std::uint32_t i) {
#pragma HLS INLINE
        Word word;
        for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
            word.lane[k] = real_of<Real>(tile[i * Lanes + k]);
            tile[i * Lanes + k] = 0;
        }
        return word;
    }

    static Fault header(In& in, std::uint32_t& left, std::uint32_t bytes, std::uint32_t params,
                        std::uint32_t tiles, std::uint32_t& format, std::uint32_t& pairs) {
        if (left < 4) return Fault::length;
        std::uint64_t words[4];
        for (int i = 0; i < 4; ++i) words[i] = in.read().lane[0];
        left -= 4;
        std::uint32_t crc = ~0u;
        for (int i = 0; i < 3; ++i) crc = crc32c(crc, words[i]);
        crc = crc32c(crc, words[3], 4);
        format = (words[0] >> 48) & 0xff, pairs = std::uint32_t(words[2]);
        if (std::uint32_t(words[0]) != TopK::magic) return Fault::header;
        if (((words[0] >> 32) & 0xffff) != TopK::version) return Fault::header;
        if (~crc != std::uint32_t(words[3] >> 32)) return Fault::checksum;
        if (format > 2 || words[0] >> 56 != TopK::tile_bits) return Fault::header;
        if (std::uint32_t(words[1]) != params || words[1] >> 32 != tiles) return Fault::header;
        return words[2] >> 32 == bytes ? Fault::none : Fault::length;
    }

    static Fault tile(In& in, std::uint32_t& left, std::uint32_t number, std::uint32_t params,
                      std::uint32_t format, Stream<Pair, 4096>& out, std::uint32_t& pairs) {
        if (left == 0) return Fault::length;
        const std::uint64_t word = in.read().lane[0];
        const std::uint32_t count = word & 0xffff, per_word = format == 0 ? 2 : 4;
        const std::uint32_t index_words = (count + 3) / 4, words = index_words + (count + per_word - 1) / per_word;
        left -= 1;
        if (count > TopK::tile_params) return Fault::count;
        if (words > left) return Fault::length;
        left -= words;
        std::uint32_t crc = crc32c(~0u, std::uint64_t(std::uint32_t(word)) << 32 | number);
        std::uint16_t index[TopK::tile_params];
#pragma HLS ARRAY_PARTITION variable = index cyclic factor = 4
        bool ascends = true;
        std::int32_t before = -1;
        // Invariant: before step i, index[0, 4 i) are read, the last of them is `before`; crc covers what was read.
        for (std::uint32_t i = 0; i < index_words; ++i) {
#pragma HLS PIPELINE II = 1
            const std::uint64_t four = in.read().lane[0];
            crc = crc32c(crc, four);
            for (std::uint32_t k = 0; k < 4 && 4 * i + k < count; ++k) {
#pragma HLS UNROLL
                const std::uint16_t one = std::uint16_t(four >> (16 * k));
                ascends = ascends && one > before;
                before = index[4 * i + k] = one;
            }
        }
        std::uint64_t values = 0;
        // Invariant: before step i, those of the pairs [0, i) that have a parameter are out.
        for (std::uint32_t i = 0; i < count; ++i) {
#pragma HLS PIPELINE II = 1
            if (i % per_word == 0) {
                values = in.read().lane[0];
                crc = crc32c(crc, values);
            }
            const std::uint32_t bits = format == 0 ? std::uint32_t(values) : std::uint32_t(values & 0xffff);
            if (index[i] < params) out.write({widen(bits, format), index[i], false});
            values >>= format == 0 ? 32 : 16;
        }
        pairs += count;
        if (~crc != word >> 32) return Fault::checksum;
        if (!ascends) return Fault::order;
        return before >= std::int32_t(params) ? Fault::range : Fault::none;
    }
};

}  // namespace nearflash
