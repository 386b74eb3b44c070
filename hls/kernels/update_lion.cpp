// update_lion: one step of Lion over `params` consecutive parameters.
//
// Reads g and p, m, all fp32; writes the arrays (over what was read, or elsewhere),
// and `copy` where copy_format is not none.
// Made by `nearflash hls kernel`. Build with -DNEARFLASH_CONFIG=<one of nearflash_config.hpp>.
#include "nearflash/optimizers/lion.hpp"
#include "nearflash/updater.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
using Update = Updater<Lion, NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
using State = Update::State;
static_assert(Update::arrays == 2, "Lion::State must have the fields p, m");
static_assert(fields<Update::Scalars, Real> == 6,
              "Lion::Scalars must have the fields lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay");

void run(const Update::Port* g, const Update::Port* p, const Update::Port* m, Update::Port* p_out,
         Update::Port* m_out, Update::CopyPort* copy, std::uint32_t params, std::uint32_t copies, Copy copy_format,
         Update::Scalars scalars, std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
#pragma HLS DATAFLOW
    Stream<Update::Word> gradients("g"), in[2], out[2];
    Stream<Update::CopyWord> narrow("copy");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(g, params, gradients));
    NEARFLASH_STAGE(load(p, params, in[0]));
    NEARFLASH_STAGE(load(m, params, in[1]));
    NEARFLASH_STAGE(Update::update<&State::p, &State::m>(
        params, scalars, copy_format, gradients, in, out, narrow, nonfinite_gradients, copy_overflows));
    NEARFLASH_STAGE(store(out[0], params, p_out));
    NEARFLASH_STAGE(store(out[1], params, m_out));
    NEARFLASH_STAGE(store(narrow, copies, copy));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void update_lion(const Update::Port* g, const Update::Port* p, const Update::Port* m, Update::Port* p_out,
                            Update::Port* m_out, Update::CopyPort* copy, std::uint32_t params, Copy copy_format,
                            Real lr, Real beta1, Real one_minus_beta1, Real beta2, Real one_minus_beta2, Real decay,
                            std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
#pragma HLS INTERFACE m_axi port = g bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = copy bundle = gmem0 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = p bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = p_out bundle = gmem1 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = m bundle = gmem2 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = m_out bundle = gmem2 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = params
#pragma HLS INTERFACE s_axilite port = copy_format
#pragma HLS INTERFACE s_axilite port = lr
#pragma HLS INTERFACE s_axilite port = beta1
#pragma HLS INTERFACE s_axilite port = one_minus_beta1
#pragma HLS INTERFACE s_axilite port = beta2
#pragma HLS INTERFACE s_axilite port = one_minus_beta2
#pragma HLS INTERFACE s_axilite port = decay
#pragma HLS INTERFACE s_axilite port = nonfinite_gradients
#pragma HLS INTERFACE s_axilite port = copy_overflows
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS INTERFACE ap_ctrl_chain port = return
    Update::Scalars scalars;
    scalars.lr = lr;
    scalars.beta1 = beta1;
    scalars.one_minus_beta1 = one_minus_beta1;
    scalars.beta2 = beta2;
    scalars.one_minus_beta2 = one_minus_beta2;
    scalars.decay = decay;
    const std::uint32_t copies = copy_format == Copy::none ? 0 : params;
    run(g, p, m, p_out, m_out, copy, params, copies, copy_format, scalars, nonfinite_gradients, copy_overflows);
}
