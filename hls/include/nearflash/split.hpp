// Halves<Lanes, PortBits>: p as the two halves of a split master (docs/contracts/numerics.md), on either side of update.
//
//     weights ─┬─ join ─► p ─► update ─► p ─ split ─┬─► weights
//     rests ───┘                                    └─► rests
//
// A weight is p rounded to bf16, ties away from zero; a rest is p's lower half, as a signed number what rounding cut.
#pragma once

#include <cstdint>

#include "nearflash/updater.hpp"

namespace nearflash {

template <int Lanes, int PortBits>
struct Halves {
    using Port = Pack<std::uint16_t, PortBits / 16>;
    using Word = Pack<std::uint16_t, Lanes>;
    using Whole = Pack<Real, Lanes>;

    // Whole port words of halves in, of p out: as many words of these, or fewer.
    static void join(std::uint32_t params, Stream<Word>& weights, Stream<Word>& rests, Stream<Whole>& p) {
        const std::uint32_t words = port_words(params, PortBits / 32, Lanes);
        // Invariant: before step i, words [0, i) of both halves are read, and those of p that `params` have written.
        for (std::uint32_t i = 0; i < port_words(params, PortBits / 16, Lanes); ++i) {
#pragma HLS PIPELINE II = 1
            const Word weight = weights.read(), rest = rests.read();
            Whole whole;
            for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
                const std::uint32_t low = rest.lane[k], up = std::uint32_t(weight.lane[k]) - (low >> 15);
                whole.lane[k] = real_of<Real>(up << 16 | low);
            }
            if (i < words) p.write(whole);
        }
    }

    // The other way. A NaN of p must be the canonical one. `copies`, p rounded to even, count what overflows (a tie
    // overflows either way), and are dropped here.
    static void split(std::uint32_t params, Stream<Whole>& p, Stream<Word>& copies, Stream<Word>& weights,
                      Stream<Word>& rests) {
        const std::uint32_t words = port_words(params, PortBits / 32, Lanes);
        // Invariant: before step i, words [0, i) of both halves are written.
        for (std::uint32_t i = 0; i < port_words(params, PortBits / 16, Lanes); ++i) {
#pragma HLS PIPELINE II = 1
            Word weight = {}, rest = {};
            copies.read();
            if (i < words) {
                const Whole whole = p.read();
                for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
                    const std::uint32_t bits = bits_of(whole.lane[k]);
                    weight.lane[k] = std::uint16_t((bits + 0x8000u) >> 16), rest.lane[k] = std::uint16_t(bits);
                }
            }
            weights.write(weight);
            rests.write(rest);
        }
    }
};

}  // namespace nearflash
