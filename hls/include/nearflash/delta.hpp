// Packer<Lanes>: what an update changes in its low-precision copy (docs/contracts/gradients.md), as it comes.
//
//     old and new words ─► compare (a word of Lanes a cycle) ─► tile ─► send ─► 64-bit words, parts
//
// A tile is kept, as its word, which has its count and its checksum, comes first: it goes through the checksum, then
// out. Each part of the delta, a tile or at last the header, comes with its place; store_delta puts it there.
#pragma once

#include <cstdint>

#include "nearflash/memory.hpp"
#include "nearflash/topk.hpp"

namespace nearflash {

struct Delta {
    static constexpr std::uint32_t magic = 0x4c44464eu;  // "NFDL"
    static constexpr std::uint32_t dense_above = 4, header_words = 4;

    // The next `words` words of the delta belong to place `first`, in words; the last part is the header.
    struct Part {
        std::uint32_t first, words;
    };

    // A tile: all its new words, and the places of those that changed, as far as there is no dense tile.
    struct Tile {
        std::uint16_t word[TopK::tile_params], index[TopK::tile_params / dense_above];
        std::uint32_t params, changed;
    };
};

template <int Lanes>
struct Packer {
    using Word = Pack<std::uint16_t, Lanes>;
    using Out = Stream<Pack<std::uint64_t, 1>>;
    static_assert(TopK::tile_params % Lanes == 0, "Lanes must divide a tile");

    // Words of `params` parameters in, with padding behind them; the delta and its parts out. format: 1 fp16, 2 bf16.
    static void pack(Stream<Word>& old, Stream<Word>& now, std::uint32_t params, std::uint32_t format, Out& out,
                     Stream<Delta::Part>& parts) {
        const std::uint32_t tiles = ceil_div(params, TopK::tile_params);
        std::uint32_t first = Delta::header_words, total = 0, heads = ~0u;
        Delta::Tile tile;
#pragma HLS ARRAY_PARTITION variable = tile.word cyclic factor = 4
#pragma HLS ARRAY_PARTITION variable = tile.index cyclic factor = 4
        // Invariant: before step t, the parts of tiles [0, t) are out, which take the places up to `first`.
        for (std::uint32_t t = 0; t < tiles; ++t) {
            const std::uint32_t rest = params - t * TopK::tile_params;
            compare(old, now, rest < TopK::tile_params ? rest : TopK::tile_params, tile);
            send(tile, t, first, total, heads, out, parts);
        }
        header(params, tiles, format, first, total, ~heads, out, parts);
    }

  private:
    static void compare(Stream<Word>& old, Stream<Word>& now, std::uint32_t params, Delta::Tile& tile) {
        std::uint32_t changed = 0;
        // Invariant: before step i, the words [0, i) are compared; the first places of those that changed are noted.
        for (std::uint32_t i = 0; i < ceil_div(params, Lanes); ++i) {
#pragma HLS PIPELINE II = 1
            const Word before = old.read(), after = now.read();
            for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
                const std::uint32_t place = i * Lanes + k;
                tile.word[place] = after.lane[k];
                if (place >= params || before.lane[k] == after.lane[k]) continue;
                if (changed < TopK::tile_params / Delta::dense_above) tile.index[changed] = std::uint16_t(place);
                ++changed;
            }
        }
        tile.params = params, tile.changed = changed;
    }

    // Word i of the sections: places of what changed, then words; of a dense tile words alone. Padding is zero.
    static std::uint64_t section(const Delta::Tile& tile, bool dense, std::uint32_t count, std::uint32_t i) {
#pragma HLS INLINE
        const std::uint32_t index_words = dense ? 0 : ceil_div(count, 4);
        std::uint64_t four = 0;
        for (std::uint32_t k = 0; k < 4; ++k) {
#pragma HLS UNROLL
            const std::uint32_t place = 4 * (i < index_words ? i : i - index_words) + k;
            if (place >= count) continue;
            const std::uint16_t index = dense ? std::uint16_t(place) : tile.index[place];
            four |= std::uint64_t(i < index_words ? index : tile.word[index]) << 16 * k;
        }
        return four;
    }

    static void send(const Delta::Tile& tile, std::uint32_t number, std::uint32_t& first, std::uint32_t& total,
                     std::uint32_t& heads, Out& out, Stream<Delta::Part>& parts) {
        const bool dense = tile.changed * Delta::dense_above > tile.params;
        const std::uint32_t count = dense ? tile.params : tile.changed, section_words = ceil_div(count, 4);
        const std::uint32_t words = dense ? section_words : 2 * section_words;
        const std::uint32_t head = count | std::uint32_t(dense) << 16;
        std::uint32_t crc = crc32c(~0u, std::uint64_t(head) << 32 | number);
        for (std::uint32_t i = 0; i < words; ++i) {
#pragma HLS PIPELINE II = 1
            crc = crc32c(crc, section(tile, dense, count, i));
        }
        const std::uint64_t word = head | std::uint64_t(~crc) << 32;
        parts.write({first, words + 1});
        out.write({word});
        for (std::uint32_t i = 0; i < words; ++i) {
#pragma HLS PIPELINE II = 1
            out.write({section(tile, dense, count, i)});
        }
        heads = crc32c(heads, word), first += words + 1, total += count;
    }

    static void header(std::uint32_t params, std::uint32_t tiles, std::uint32_t format, std::uint32_t end,
                       std::uint32_t total, std::uint32_t heads, Out& out, Stream<Delta::Part>& parts) {
        const std::uint64_t words[4] = {
            Delta::magic | std::uint64_t(TopK::version | format << 16 | TopK::tile_bits << 24) << 32,
            params | std::uint64_t(tiles) << 32,
            total | std::uint64_t(8 * end) << 32,
            heads,
        };
        std::uint32_t crc = ~0u;
        for (int i = 0; i < 3; ++i) crc = crc32c(crc, words[i]);
        crc = crc32c(crc, words[3], 4);
        parts.write({0, Delta::header_words});
        for (int i = 0; i < 3; ++i) out.write({words[i]});
        out.write({words[3] | std::uint64_t(~crc) << 32});
    }
};

// The parts of one delta to memory, in port words of Wide. The port word that the header shares with the first tile is
// written last, and once; the last one with what lay past the end.
template <int Wide>
void store_delta(Stream<Pack<std::uint64_t, 1>>& words, Stream<Delta::Part>& parts,
                 Pack<std::uint64_t, Wide>* memory) {
    constexpr bool shared = Wide > int(Delta::header_words);
    Pack<std::uint64_t, Wide> head = {}, open = {};
    std::uint32_t end = 0;
    // Invariant: before each part, the words of those before it are in memory, in `open` or in `head`.
    for (bool header = false; !header;) {
        const Delta::Part part = parts.read();
        header = part.first == 0;
        if (header && end % Wide != 0 && !(shared && end < Wide)) {
            const Pack<std::uint64_t, Wide> last = memory[end / Wide];
            for (std::uint32_t k = end % Wide; k < Wide; ++k) open.lane[k] = last.lane[k];
            memory[end / Wide] = open;
        }
        for (std::uint32_t i = 0; i < part.words; ++i) {
#pragma HLS PIPELINE II = 1
            const std::uint32_t place = part.first + i;
            const std::uint64_t word = words.read().lane[0];
            if (shared && place < Wide) {
                head.lane[place] = word;
                continue;
            }
            open.lane[place % Wide] = word;
            if (place % Wide == Wide - 1) memory[place / Wide] = open;
        }
        if (!header) end = part.first + part.words;
    }
    if (!shared) return;
    if (end < Wide) {
        const Pack<std::uint64_t, Wide> last = memory[0];
        for (std::uint32_t k = end; k < Wide; ++k) head.lane[k] = last.lane[k];
    }
    memory[0] = head;
}

}  // namespace nearflash
