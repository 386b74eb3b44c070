// AdaGrad (Duchi, Hazan and Singer 2011) as torch has it.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F>
struct Adagrad {
    struct Scalars {
        F step_size;  // lr / (1 + (t - 1) lr_decay)
        F eps;
        F decay;  // weight decay (L2)
    };
    struct State {
        F p, v;
    };

    static State step(State s, F g, Scalars c) {
        if (c.decay != F(0)) g = g + c.decay * s.p;
        const F v = s.v + g * g;
        return {s.p - c.step_size * (g / (sqrt(v) + c.eps)), v};
    }
};

NEARFLASH_OPTIMIZER(Adagrad);

}  // namespace nearflash
