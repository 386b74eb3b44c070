// update_sgd: one step of Sgd over `params` consecutive parameters.
//
// Reads g and p, all fp32; writes the arrays (over what was read, or elsewhere),
// and `copy` where copy_format is not none.
// Made by `nearflash hls kernel`. Build with -DNEARFLASH_CONFIG=<one of nearflash_config.hpp>.
#include "nearflash/optimizers/sgd.hpp"
#include "nearflash/updater.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
using Update = Updater<Sgd, NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
using State = Update::State;
static_assert(Update::arrays == 1, "Sgd::State must have the fields p");
static_assert(fields<Update::Scalars, Real> == 2,
              "Sgd::Scalars must have the fields lr, decay");

void run(const Update::Port* g, const Update::Port* p, Update::Port* p_out, Update::CopyPort* copy,
         std::uint32_t params, std::uint32_t copies, Copy copy_format, Update::Scalars scalars,
         std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
#pragma HLS DATAFLOW
    Stream<Update::Word> gradients("g"), in[1], out[1];
    Stream<Update::CopyWord> narrow("copy");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(g, params, gradients));
    NEARFLASH_STAGE(load(p, params, in[0]));
    NEARFLASH_STAGE(Update::update<&State::p>(
        params, scalars, copy_format, gradients, in, out, narrow, nonfinite_gradients, copy_overflows));
    NEARFLASH_STAGE(store(out[0], params, p_out));
    NEARFLASH_STAGE(store(narrow, copies, copy));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void update_sgd(const Update::Port* g, const Update::Port* p, Update::Port* p_out, Update::CopyPort* copy,
                           std::uint32_t params, Copy copy_format, Real lr, Real decay,
                           std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
#pragma HLS INTERFACE m_axi port = g bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = copy bundle = gmem0 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = p bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = p_out bundle = gmem1 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = params
#pragma HLS INTERFACE s_axilite port = copy_format
#pragma HLS INTERFACE s_axilite port = lr
#pragma HLS INTERFACE s_axilite port = decay
#pragma HLS INTERFACE s_axilite port = nonfinite_gradients
#pragma HLS INTERFACE s_axilite port = copy_overflows
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS INTERFACE ap_ctrl_chain port = return
    Update::Scalars scalars;
    scalars.lr = lr;
    scalars.decay = decay;
    const std::uint32_t copies = copy_format == Copy::none ? 0 : params;
    run(g, p, p_out, copy, params, copies, copy_format, scalars, nonfinite_gradients, copy_overflows);
}
