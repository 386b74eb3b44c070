// expand_levels: a block of coded weights (docs/contracts/weights.md, section 5) to `elements` dense 16-bit elements.
//
// Each plane is a section of the block, read in whole port words; `codebook` is its group's. Without a bitmap
// (`has_bitmap` 0) every element has a value. codes_fault: 0, or 1 where a plane has another number of fields than the
// codes ask for; values_fault: 0, or 1 where the bitmap has another number of ones than there are values; then the
// output must not be used.
#include "nearflash/bitmap.hpp"
#include "nearflash/levels.hpp"
#include "nearflash_config.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
constexpr int port_bits = NEARFLASH_CONFIG::port_bits, lanes = port_bits / 32;
using Values = Expander<Levels, lanes>;
using Dense = Expander<Bitmap, lanes>;
using BitPort = Pack<std::uint64_t, port_bits / 64>;
using FieldPort = Pack<std::uint32_t, port_bits / 32>;
using BytePort = Pack<std::uint8_t, port_bits / 8>;
using Port = Pack<std::uint16_t, port_bits / 16>;

// Words of the bitmap; without one, ones.
void load_bits(const BitPort* bitmap, bool has_bitmap, std::uint32_t count, Stream<Pack<std::uint64_t, 1>>& out) {
    if (has_bitmap) {
        load(bitmap, count, out);
        return;
    }
    const std::uint32_t words = port_words(count, port_bits / 64, 1);
    for (std::uint32_t i = 0; i < words; ++i) {
#pragma HLS PIPELINE II = 1
        out.write({{~std::uint64_t(0)}});
    }
}

void run(const BitPort* bitmap, const FieldPort* first, const FieldPort* second, const FieldPort* third,
         const FieldPort* fourth, const BytePort* escapes, const FieldPort* low, const FieldPort* middle,
         const BytePort* high, const std::uint8_t* codebook, Port* dense, std::uint32_t elements, bool has_bitmap,
         std::uint32_t code_bits, bool bf16, Levels::Counts counts, std::uint32_t* codes_fault,
         std::uint32_t* values_fault) {
#pragma HLS DATAFLOW
    Stream<Pack<std::uint64_t, 1>> bits("bitmap");
    Stream<Fields::Word> firsts("first"), seconds("second"), thirds("third"), fourths("fourth"), lows("low"),
        middles("middle");
    Stream<Values::Bytes> escaped("escapes"), highs("values");
    Stream<Values::Word> values("expanded"), words("dense");
    const std::uint32_t narrow = bf16 ? 0 : counts.values;
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load_bits(bitmap, has_bitmap, ceil_div(elements, 64), bits));
    NEARFLASH_STAGE(load(first, ceil_div(counts.values * code_bits, 32), firsts));
    NEARFLASH_STAGE(load(second, ceil_div(counts.second, 32), seconds));
    NEARFLASH_STAGE(load(third, ceil_div(counts.third * code_bits, 32), thirds));
    NEARFLASH_STAGE(load(fourth, ceil_div(counts.fourth * 2, 32), fourths));
    NEARFLASH_STAGE(load(escapes, counts.escapes, escaped));
    NEARFLASH_STAGE(load(low, ceil_div(narrow, 32), lows));
    NEARFLASH_STAGE(load(middle, ceil_div(narrow * 2, 32), middles));
    NEARFLASH_STAGE(load(high, counts.values, highs));
    NEARFLASH_STAGE(Values::expand<port_bits>(firsts, seconds, thirds, fourths, escaped, lows, middles, highs, codebook,
                                              counts, code_bits, bf16, values,
                                              port_words(counts.values, port_bits / 16, lanes), codes_fault));
    NEARFLASH_STAGE(Dense::expand(bits, port_words(ceil_div(elements, 64), port_bits / 64, 1), values,
                                  port_words(counts.values, port_bits / 16, lanes), elements, counts.values, words,
                                  port_words(elements, port_bits / 16, lanes), values_fault));
    NEARFLASH_STAGE(store(words, elements, dense));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void expand_levels(const BitPort* bitmap, const FieldPort* first, const FieldPort* second,
                              const FieldPort* third, const FieldPort* fourth, const BytePort* escapes,
                              const FieldPort* low, const FieldPort* middle, const BytePort* high,
                              const std::uint8_t* codebook, Port* dense, std::uint32_t elements,
                              std::uint32_t has_bitmap, std::uint32_t code_bits, std::uint32_t bf16,
                              std::uint32_t values, std::uint32_t seconds, std::uint32_t thirds, std::uint32_t fourths,
                              std::uint32_t exponents, std::uint32_t* codes_fault, std::uint32_t* values_fault) {
#pragma HLS INTERFACE m_axi port = bitmap bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = first bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = second bundle = gmem2 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = third bundle = gmem3 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = fourth bundle = gmem4 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = escapes bundle = gmem5 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = low bundle = gmem6 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = middle bundle = gmem7 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = high bundle = gmem8 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = codebook bundle = gmem9 offset = slave
#pragma HLS INTERFACE m_axi port = dense bundle = gmem10 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = elements
#pragma HLS INTERFACE s_axilite port = has_bitmap
#pragma HLS INTERFACE s_axilite port = code_bits
#pragma HLS INTERFACE s_axilite port = bf16
#pragma HLS INTERFACE s_axilite port = values
#pragma HLS INTERFACE s_axilite port = seconds
#pragma HLS INTERFACE s_axilite port = thirds
#pragma HLS INTERFACE s_axilite port = fourths
#pragma HLS INTERFACE s_axilite port = exponents
#pragma HLS INTERFACE s_axilite port = codes_fault
#pragma HLS INTERFACE s_axilite port = values_fault
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS INTERFACE ap_ctrl_chain port = return
    run(bitmap, first, second, third, fourth, escapes, low, middle, high, codebook, dense, elements, has_bitmap != 0,
        code_bits, bf16 != 0, {values, seconds, thirds, fourths, exponents}, codes_fault, values_fault);
}
