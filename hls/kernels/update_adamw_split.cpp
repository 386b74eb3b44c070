// update_adamw_split: one step of AdamW over `params` consecutive parameters.
//
// Reads g and p, m, v, all fp32; writes the arrays (over what was read, or elsewhere),
// and no copy: p is a split master, and its bf16 weights are one.
// Made by `nearflash hls kernel`. Build with -DNEARFLASH_CONFIG=<one of nearflash_config.hpp>.
#include "nearflash/optimizers/adam.hpp"
#include "nearflash/split.hpp"
#include "nearflash/updater.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {
using namespace nearflash;
using Update = Updater<AdamW, NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
using State = Update::State;
using Split = Halves<NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
static_assert(Update::arrays == 3, "AdamW::State must have the fields p, m, v");
static_assert(fields<Update::Scalars, Real> == 9,
              "AdamW::Scalars must have the fields beta1, one_minus_beta1, beta2, one_minus_beta2, eps, "
              "step_size, root, decay, decays");

void run(const Update::Port* g, const Split::Port* weight, const Split::Port* rest, const Update::Port* m,
         const Update::Port* v, Split::Port* weight_out, Split::Port* rest_out, Update::Port* m_out,
         Update::Port* v_out, std::uint32_t params, Update::Scalars scalars, std::uint32_t* nonfinite_gradients,
         std::uint32_t* copy_overflows) {
#pragma HLS DATAFLOW
    Stream<Update::Word> gradients("g"), in[3], out[3];
    Stream<Update::CopyWord> narrow("copy"), weights("weights"), rests("rests");
    Stream<Update::CopyWord> new_weights("new weights"), new_rests("new rests");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(g, params, gradients));
    NEARFLASH_STAGE(load(weight, params, weights));
    NEARFLASH_STAGE(load(rest, params, rests));
    NEARFLASH_STAGE(Split::join(params, weights, rests, in[0]));
    NEARFLASH_STAGE(load(m, params, in[1]));
    NEARFLASH_STAGE(load(v, params, in[2]));
    NEARFLASH_STAGE(Update::update<&State::p, &State::m, &State::v>(
        params, scalars, Copy::bf16, gradients, in, out, narrow, nonfinite_gradients, copy_overflows));
    NEARFLASH_STAGE(store(out[1], params, m_out));
    NEARFLASH_STAGE(store(out[2], params, v_out));
    NEARFLASH_STAGE(Split::split(params, out[0], narrow, new_weights, new_rests));
    NEARFLASH_STAGE(store(new_weights, params, weight_out));
    NEARFLASH_STAGE(store(new_rests, params, rest_out));
    NEARFLASH_JOIN
}
}  // namespace

extern "C" void update_adamw_split(const Update::Port* g, const Split::Port* weight, const Split::Port* rest,
                                   const Update::Port* m, const Update::Port* v, Split::Port* weight_out,
                                   Split::Port* rest_out, Update::Port* m_out, Update::Port* v_out,
                                   std::uint32_t params, Real beta1, Real one_minus_beta1, Real beta2,
                                   Real one_minus_beta2, Real eps, Real step_size, Real root, Real decay, Real decays,
                                   std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
#pragma HLS INTERFACE m_axi port = g bundle = gmem0 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = weight bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = weight_out bundle = gmem1 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = rest bundle = gmem1 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = rest_out bundle = gmem1 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = m bundle = gmem2 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = m_out bundle = gmem2 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE m_axi port = v bundle = gmem3 offset = slave max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = v_out bundle = gmem3 offset = slave max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = params
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
    run(g, weight, rest, m, v, weight_out, rest_out, m_out, v_out, params, scalars, nonfinite_gradients,
        copy_overflows);
}
