// AdaGrad (Duchi, Hazan and Singer 2011) as torch has it.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F, Profile Order>
struct AdagradStep {
    static constexpr bool fused = Order == Profile::torch_fused;

    struct Scalars {
        F step_size;  // lr / (1 + (t - 1) lr_decay)
        F eps;
        F decay;  // weight decay (L2)
    };
    struct State {
        F p, v;
    };

    static State step(State s, F g, Scalars c) {
        if (c.decay != F(0)) g = fused ? fma(s.p, c.decay, g) : g + c.decay * s.p;
        const F v = fused ? fma(g, g, s.v) : s.v + g * g;
        const F d = sqrt(v) + c.eps;
        return {s.p - (fused ? (c.step_size * g) / d : c.step_size * (g / d)), v};
    }
};

template <typename F>
using Adagrad = AdagradStep<F, Profile::ieee>;
template <typename F>
using AdagradTorchFused = AdagradStep<F, Profile::torch_fused>;

NEARFLASH_OPTIMIZER(Adagrad);

}  // namespace nearflash
