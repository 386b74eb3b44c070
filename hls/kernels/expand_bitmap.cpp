// expand_bitmap: a row's bitmap and `values` packed values (docs/contracts/weights.md) to `elements` dense 16-bit elements.
//
// The bitmap is read in whole port words. fault: 0, or 1 where the bitmap has another number of ones than there are
// values; then the output must not be used.
#include "nearflash/bitmap.hpp"
#include "nearflash_config.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
constexpr int port_bits = NEARFLASH_CONFIG::port_bits, lanes = port_bits / 32;
using Expand = Expander<Bitmap, lanes>;
using BitPort = Pack<std::uint64_t, port_bits / 64>;
using Port = Pack<std::uint16_t, port_bits / 16>;

void run(const BitPort* bitmap, const Port* packed, Port* dense, std::uint32_t elements, std::uint32_t values,
         std::uint32_t* fault) {
#pragma HLS DATAFLOW
    Stream<Pack<std::uint64_t, 1>> bits("bitmap");
    Stream<Expand::Word> values_in("packed"), words("dense");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(bitmap, ceil_div(elements, 64), bits));
    NEARFLASH_STAGE(load(packed, values, values_in));
    NEARFLASH_STAGE(Expand::expand(bits, port_words(ceil_div(elements, 64), port_bits / 64, 1), values_in,
                                   port_words(values, port_bits / 16, lanes), elements, values, words,
                                   port_words(elements, port_bits / 16, lanes), fault));
    NEARFLASH_STAGE(store(words, elements, dense));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void expand_bitmap(const BitPort* bitmap, const Port* packed, Port* dense, std::uint32_t elements,
                              std::uint32_t values, std::uint32_t* fault) {
#pragma HLS INTERFACE m_axi port = bitmap bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = packed bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = dense bundle = gmem2 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = elements
#pragma HLS INTERFACE s_axilite port = values
#pragma HLS INTERFACE s_axilite port = fault
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS INTERFACE ap_ctrl_chain port = return
    run(bitmap, packed, dense, elements, values, fault);
}
