// Stochastic gradient descent as torch has it: with momentum, dampening and Nesterov, and without momentum.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F>
struct SgdMomentum {
    struct Scalars {
        F lr;
        F retained;  // factor of m: momentum, and -0 at the first step, where m becomes the gradient
        F gain;      // factor of g: 1 - dampening, and 1 at the first step
        F nesterov;  // momentum, or 0 without Nesterov
        F decay;     // weight decay (L2)
    };
    struct State {
        F p, m;
    };

    static State step(State s, F g, Scalars c) {
        if (c.decay != F(0)) g = g + c.decay * s.p;
        const F m = c.retained * s.m + c.gain * g;
        const F direction = c.nesterov != F(0) ? g + c.nesterov * m : m;
        return {s.p - c.lr * direction, m};
    }
};

template <typename F>
struct Sgd {
    struct Scalars {
        F lr, decay;
    };
    struct State {
        F p;
    };

    static State step(State s, F g, Scalars c) {
        if (c.decay != F(0)) g = g + c.decay * s.p;
        return {s.p - c.lr * g};
    }
};

NEARFLASH_OPTIMIZER(SgdMomentum);
NEARFLASH_OPTIMIZER(Sgd);

}  // namespace nearflash
