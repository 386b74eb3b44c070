// expand_topk: a Top-K gradient stream of `bytes` bytes to `params` dense fp32 gradients.
//
// fault: 0, or the StreamFault (nearflash.abi.topk); then the output must not be used. stream and dense begin at
// multiples of a port word.
#include "nearflash/topk.hpp"
#include "nearflash_config.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
constexpr int port_bits = NEARFLASH_CONFIG::port_bits, lanes = NEARFLASH_CONFIG::lanes;
using Expand = Expander<TopK, lanes>;
using Port = Pack<Real, port_bits / 32>;
using StreamPort = Pack<std::uint64_t, port_bits / 64>;

void run(const StreamPort* stream, Port* dense, std::uint32_t bytes, std::uint32_t params, std::uint32_t* fault) {
#pragma HLS DATAFLOW
    Expand::In words("stream");
    Stream<TopK::Pair, 4096> pairs("pairs");
    Stream<Expand::Word> gradients("gradients");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(stream, bytes / 8, words));
    NEARFLASH_STAGE(Expand::parse(words, port_words(bytes / 8, port_bits / 64, 1), bytes, params, pairs, fault));
    NEARFLASH_STAGE(Expand::scatter(pairs, params, port_words(params, port_bits / 32, lanes), gradients));
    NEARFLASH_STAGE(store(gradients, params, dense));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void expand_topk(const StreamPort* stream, Port* dense, std::uint32_t bytes, std::uint32_t params,
                            std::uint32_t* fault) {
#pragma HLS INTERFACE m_axi port = stream bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = dense bundle = gmem1 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = bytes
#pragma HLS INTERFACE s_axilite port = params
#pragma HLS INTERFACE s_axilite port = fault
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS INTERFACE ap_ctrl_chain port = return
    run(stream, dense, bytes, params, fault);
}
