// Expander<Bitmap, Lanes>: a row of a bitmap matrix of 16-bit elements (docs/contracts/weights.md) to dense elements.
//
// Bit i of the bitmap, lowest first, says whether element i is the next packed value or zero. Each cycle takes Lanes
// bits, counts those before each, and picks from a window of two words of values. Where the bitmap has another number
// of ones than there are values, the fault is set and the output must not be used. The matrix's header and checksums are
// its reader's business.
#pragma once

#include <cstdint>

#include "nearflash/expander.hpp"
#include "nearflash/memory.hpp"

namespace nearflash {

struct Bitmap {
    enum class Fault : std::uint32_t { none, values };
};

template <int Lanes>
struct Expander<Bitmap, Lanes> {
    static_assert(Lanes > 0 && 64 % Lanes == 0, "Lanes must divide the bitmap's word of 64 bits");
    using Word = Pack<std::uint16_t, Lanes>;

    // bit_words of bitmap and value_words of packed values in, `words` words of dense elements out; `elements` and
    // `values` of them count.
    static void expand(Stream<Pack<std::uint64_t, 1>>& bits, std::uint32_t bit_words, Stream<Word>& packed,
                       std::uint32_t value_words, std::uint32_t elements, std::uint32_t values, Stream<Word>& out,
                       std::uint32_t words, std::uint32_t* fault) {
        std::uint16_t window[2 * Lanes] = {};
#pragma HLS ARRAY_PARTITION variable = window complete
        std::uint32_t held = 0, used = 0;
        std::uint64_t bitmap = 0;
        // Invariant: before step i, words [0, i) are out, made of `used` values; the window holds the next `held`.
        for (std::uint32_t i = 0; i < words; ++i) {
#pragma HLS PIPELINE II = 1
            if (i % (64 / Lanes) == 0) bitmap = bits.read().lane[0], --bit_words;
            if (held < Lanes && value_words > 0) {
                const Word next = packed.read();
                for (int k = 0; k < Lanes; ++k) window[held + k] = next.lane[k];
                held += Lanes, --value_words;
            }
            Word word;
            std::uint32_t ones = 0;
            for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
                const bool one = ((bitmap >> k) & 1) && i * Lanes + k < elements;
                word.lane[k] = one ? window[ones] : 0;
                ones += one;
            }
            out.write(word);
            bitmap >>= Lanes % 64;
            const std::uint32_t taken = ones < held ? ones : held;
            for (int k = 0; k < 2 * Lanes; ++k) window[k] = k + taken < 2 * Lanes ? window[k + taken] : 0;
            held -= taken, used += ones;
        }
        for (; bit_words > 0; --bit_words) bits.read();
        for (; value_words > 0; --value_words) packed.read();
        *fault = std::uint32_t(used == values ? Bitmap::Fault::none : Bitmap::Fault::values);
    }
};

}  // namespace nearflash
