// update_adamw: one step of AdamW over `params` consecutive parameters.
//
// Reads g and p, m, v, all fp32; writes the arrays (over what was read, or elsewhere),
// and `copy` where copy_format is not none.
// Made by `nearflash hls kernel`. Build with -DNEARFLASH_CONFIG=<one of nearflash_config.hpp>.
#include "nearflash/optimizers/adam.hpp"
#include "nearflash/updater.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
using Update = Updater<AdamW, NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
using State = Update::State;
static_assert(Update::arrays == 3, "AdamW::State must have the fields p, m, v");
static_assert(fields<Update::Scalars, Real> == 9,
              "AdamW::Scalars must have the fields beta1, one_minus_beta1, beta2, one_minus_beta2, eps, "
              "step_size, root, decay, decays");

void run(const Update::Port* g, const Update::Port* p, const Update::Port* m, const Update::Port* v,
         Update::Port* p_out, Update::Port* m_out, Update::Port* v_out, Update::CopyPort* copy, std::uint32_t params,
         std::uint32_t copies, Copy copy_format, Update::Scalars scalars, std::uint32_t* nonfinite_gradients,
         std::uint32_t* copy_overflows) {
#pragma HLS DATAFLOW
    Stream<Update::Word> gradients("g"), in[3], out[3];
    Stream<Update::CopyWord> narrow("copy");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(g, params, gradients));
    NEARFLASH_STAGE(load(p, params, in[0]));
    NEARFLASH_STAGE(load(m, params, in[1]));
    NEARFLASH_STAGE(load(v, params, in[2]));
    NEARFLASH_STAGE(Update::update<&State::p, &State::m, &State::v>(
        params, scalars, copy_format, gradients, in, out, narrow, nonfinite_gradients, copy_overflows));
    NEARFLASH_STAGE(store(out[0], params, p_out));
    NEARFLASH_STAGE(store(out[1], params, m_out));
    NEARFLASH_STAGE(store(out[2], params, v_out));
    NEARFLASH_STAGE(store(narrow, copies, copy));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void update_adamw(const Update::Port* g, const Update::Port* p, const Update::Port* m,
                             const Update::Port* v, Update::Port* p_out, Update::Port* m_out, Update::Port* v_out,
                             Update::CopyPort* copy, std::uint32_t params, Copy copy_format, Real beta1,
                             Real one_minus_beta1, Real beta2, Real one_minus_beta2, Real eps, Real step_size,
                             Real root, Real decay, Real decays, std::uint32_t* nonfinite_gradients,
                             std::uint32_t* copy_overflows) {
#pragma HLS INTERFACE m_axi port = g bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = copy bundle = gmem0 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = p bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = p_out bundle = gmem1 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = m bundle = gmem2 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = m_out bundle = gmem2 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = v bundle = gmem3 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = v_out bundle = gmem3 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = params
#pragma HLS INTERFACE s_axilite port = copy_format
#pragma HLS INTERFACE s_axilite port = beta1
#pragma HLS INTERFACE s_axilite port = one_minus_beta1
#pragma HLS INTERFACE s_axilite port = beta2
#pragma HLS INTERFACE s_axilite port = one_minus_beta2
#pragma HLS INTERFACE s_axilite port = eps
#pragma HLS INTERFACE s_axilite port = step_size
#pragma HLS INTERFACE s_axilite port = root
#pragma HLS INTERFACE s_axilite port = decay
#pragma HLS INTERFACE s_axilite port = decays
#pragma HLS INTERFACE s_axilite port = nonfinite_gradients
#pragma HLS INTERFACE s_axilite port = copy_overflows
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS INTERFACE ap_ctrl_chain port = return
    Update::Scalars scalars;
    scalars.beta1 = beta1;
    scalars.one_minus_beta1 = one_minus_beta1;
    scalars.beta2 = beta2;
    scalars.one_minus_beta2 = one_minus_beta2;
    scalars.eps = eps;
    scalars.step_size = step_size;
    scalars.root = root;
    scalars.decay = decay;
    scalars.decays = decays;
    const std::uint32_t copies = copy_format == Copy::none ? 0 : params;
    run(g, p, m, v, p_out, m_out, v_out, copy, params, copies, copy_format, scalars, nonfinite_gradients,
        copy_overflows);
}
