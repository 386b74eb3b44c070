// AMSGrad (Reddi, Kale and Kumar 2018) with AdamW's decay: divides by the largest v so far, an array more than AdamW.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F>
struct Amsgrad {
    struct Scalars {
        F beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, root, decay;
    };
    struct State {
        F p, m, v, vmax;
    };

    static State step(State s, F g, Scalars c) {
        const F m = c.beta1 * s.m + c.one_minus_beta1 * g;
        const F v = c.beta2 * s.v + (c.one_minus_beta2 * g) * g;
        const F vmax = s.vmax > v ? s.vmax : v;
        const F update = m / (sqrt(vmax) / c.root + c.eps);
        return {c.decay * s.p - c.step_size * update, m, v, vmax};
    }
};

NEARFLASH_OPTIMIZER(Amsgrad);

}  // namespace nearflash
