// Expander<Levels, Lanes>: values whose exponents are coded in levels (docs/contracts/weights.md, section 5) to words.
//
// The first level has a code of each value. A code that is its level's last one, all ones, takes the next code of the
// level behind it; that of the fourth level takes the next exponent as it is. The sum of a value's codes is the place of
// its exponent in the codebook. Each cycle takes Lanes values through all levels. Where a plane has another number of
// fields than the codes ask for, the fault is set and the output must not be used. The header, the sections' places and
// the checksums are the reader's business.
#pragma once

#include <cstdint>

#include "nearflash/expander.hpp"
#include "nearflash/memory.hpp"

namespace nearflash {

struct Levels {
    enum class Fault : std::uint32_t { none, codes };
    static constexpr int planes = 4, entries = 10;

    // Of a block: its values, the fields of the second, third and fourth level, and exponents as they are.
    struct Counts {
        std::uint32_t values, second, third, fourth, escapes;
    };
};

// Fields of a plane, up to 32 bits a call, out of words of 32 bits.
class Fields {
  public:
    using Word = Pack<std::uint32_t, 1>;

    explicit Fields(std::uint32_t words) : left_(words) {}

    std::uint32_t take(Stream<Word>& in, std::uint32_t bits) {
#pragma HLS INLINE
        if (held_ < 32 && left_ > 0) {
            window_ |= std::uint64_t(in.read().lane[0]) << held_;
            held_ += 32, --left_;
        }
        const auto taken = std::uint32_t(window_ & ((std::uint64_t(1) << bits) - 1));
        window_ >>= bits;
        held_ -= bits < held_ ? bits : held_;
        return taken;
    }

    void drain(Stream<Word>& in) {
        for (; left_ > 0; --left_) in.read();
    }

  private:
    // Invariant: the window holds the next held_ bits, and zeros; left_ words are still to be read.
    std::uint64_t window_ = 0;
    std::uint32_t held_ = 0, left_;
};

template <int Lanes>
struct Expander<Levels, Lanes> {
    static_assert(Lanes > 0 && Lanes <= 16, "Lanes codes of two bits must fit a word of 32 bits");
    using Word = Pack<std::uint16_t, Lanes>;
    using Bytes = Pack<std::uint8_t, Lanes>;
    using Plane = Stream<Fields::Word>;

    // Words of the streams that `load` makes of planes in ports of Bits bits.
    template <int Bits>
    static constexpr std::uint32_t field_words(std::uint32_t fields, std::uint32_t bits) {
        return port_words(ceil_div(fields * bits, 32), Bits / 32, 1);
    }
    template <int Bits>
    static constexpr std::uint32_t byte_words(std::uint32_t bytes) {
        return port_words(bytes, Bits / 8, Lanes);
    }

    // code_bits: of the first and third level, 1 or 2. bf16: else fp16, which has the planes low and middle, too.
    // `words` words of values leave, of which counts.values count.
    template <int Bits>
    static void expand(Plane& first, Plane& second, Plane& third, Plane& fourth, Stream<Bytes>& escapes, Plane& low,
                       Plane& middle, Stream<Bytes>& high, const std::uint8_t* codebook, Levels::Counts counts,
                       std::uint32_t code_bits, bool bf16, Stream<Word>& out, std::uint32_t words,
                       std::uint32_t* fault) {
        const std::uint32_t wanted[Levels::planes] = {counts.values, counts.second, counts.third, counts.fourth};
        const std::uint32_t bits[Levels::planes] = {code_bits, 1, code_bits, 2};
        Plane* const in[Levels::planes] = {&first, &second, &third, &fourth};
        Fields levels[Levels::planes] = {Fields(field_words<Bits>(wanted[0], bits[0])),
                                         Fields(field_words<Bits>(wanted[1], bits[1])),
                                         Fields(field_words<Bits>(wanted[2], bits[2])),
                                         Fields(field_words<Bits>(wanted[3], bits[3]))};
        const std::uint32_t narrow_values = bf16 ? 0 : counts.values;
        Fields lows(field_words<Bits>(narrow_values, 1)), middles(field_words<Bits>(narrow_values, 2));
        std::uint32_t used[Levels::planes + 1] = {}, escape_words = byte_words<Bits>(counts.escapes), held = 0;
        std::uint32_t high_words = byte_words<Bits>(counts.values);
        std::uint8_t window[2 * Lanes] = {}, book[Levels::entries];
#pragma HLS ARRAY_PARTITION variable = levels complete
#pragma HLS ARRAY_PARTITION variable = used complete
#pragma HLS ARRAY_PARTITION variable = window complete
#pragma HLS ARRAY_PARTITION variable = book complete
        for (int k = 0; k < Levels::entries; ++k) book[k] = codebook[k];
        // Invariant: before step i, words [0, i) are out, made of used[l] fields of level l; the window holds the next
        // `held` escaped exponents.
        for (std::uint32_t i = 0; i < words; ++i) {
#pragma HLS PIPELINE II = 1
            const std::uint32_t at = i * Lanes, rest = at < counts.values ? counts.values - at : 0;
            const std::uint32_t here = rest < Lanes ? rest : std::uint32_t(Lanes);
            bool deeper[Lanes];
            std::uint32_t entry[Lanes], deep = here;
            for (int k = 0; k < Lanes; ++k) deeper[k] = std::uint32_t(k) < here, entry[k] = 0;
            for (int l = 0; l < Levels::planes; ++l) {
#pragma HLS UNROLL
                const std::uint32_t last = (1u << bits[l]) - 1, codes = levels[l].take(*in[l], deep * bits[l]);
                used[l] += deep, deep = 0;
                std::uint32_t shift = 0;
                for (int k = 0; k < Lanes; ++k) {
                    const std::uint32_t code = deeper[k] ? codes >> shift & last : 0;
                    shift += deeper[k] ? bits[l] : 0, entry[k] += code;
                    deeper[k] = deeper[k] && code == last, deep += deeper[k];
                }
            }
            used[Levels::planes] += deep;
            if (held < Lanes && escape_words > 0) {
                const Bytes next = escapes.read();
                for (int k = 0; k < Lanes; ++k) window[held + k] = next.lane[k];
                held += Lanes, --escape_words;
            }
            Bytes rests = {};
            if (high_words > 0) rests = high.read(), --high_words;
            const std::uint32_t one = lows.take(low, bf16 ? 0 : here), two = middles.take(middle, bf16 ? 0 : 2 * here);
            Word word;
            std::uint32_t escaped = 0;
            for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
                const std::uint32_t exponent = deeper[k] ? window[escaped] : book[entry[k] % Levels::entries];
                escaped += deeper[k];
                const std::uint32_t sign = std::uint32_t(rests.lane[k] >> 7) << 15, rest7 = rests.lane[k] & 127;
                const std::uint32_t wide = exponent << 7 | rest7, low3 = (two >> 2 * k & 3) << 1 | (one >> k & 1);
                const std::uint32_t value = sign | (bf16 ? wide : (exponent & 31) << 10 | rest7 << 3 | low3);
                word.lane[k] = std::uint32_t(k) < here ? std::uint16_t(value) : 0;
            }
            out.write(word);
            const std::uint32_t taken = escaped < held ? escaped : held;
            for (int k = 0; k < 2 * Lanes; ++k) window[k] = k + taken < 2 * Lanes ? window[k + taken] : 0;
            held -= taken;
        }
        for (int l = 0; l < Levels::planes; ++l) levels[l].drain(*in[l]);
        lows.drain(low), middles.drain(middle);
        for (; escape_words > 0; --escape_words) escapes.read();
        for (; high_words > 0; --high_words) high.read();
        bool equal = used[Levels::planes] == counts.escapes;
        for (int l = 0; l < Levels::planes; ++l) equal = equal && used[l] == wanted[l];
        *fault = std::uint32_t(equal ? Levels::Fault::none : Levels::Fault::codes);
    }
};

}  // namespace nearflash
