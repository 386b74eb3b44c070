// Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F>
struct Lion {
    struct Scalars {
        F lr, beta1, one_minus_beta1, beta2, one_minus_beta2;
        F decay;  // factor of p: 1 - lr weight_decay
    };
    struct State {
        F p, m;
    };

    static State step(State s, F g, Scalars c) {
        const F u = c.beta1 * s.m + c.one_minus_beta1 * g;
        const F sign = u > F(0) ? F(1) : u < F(0) ? F(-1) : u == F(0) ? F(0) : u;  // of NaN: NaN
        return {c.decay * s.p - c.lr * sign, c.beta2 * s.m + c.one_minus_beta2 * g};
    }
};

NEARFLASH_OPTIMIZER(Lion);

}  // namespace nearflash
