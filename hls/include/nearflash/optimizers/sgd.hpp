// Stochastic gradient descent as torch has it: with momentum, dampening and Nesterov, and without momentum.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F, Profile Order>
struct SgdMomentumStep {
    static constexpr bool fused = Order == Profile::torch_fused;

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
        if (c.decay != F(0)) g = fused ? fma(s.p, c.decay, g) : g + c.decay * s.p;
        const F kept = c.retained * s.m;
        const F m = fused ? fma(c.gain, g, kept) : kept + c.gain * g;
        F direction = m;
        if (c.nesterov != F(0)) direction = fused ? fma(m, c.nesterov, g) : g + c.nesterov * m;
        return {fused ? fma(direction, -c.lr, s.p) : s.p - c.lr * direction, m};
    }
};

template <typename F, Profile Order>
struct SgdStep {
    static constexpr bool fused = Order == Profile::torch_fused;

    struct Scalars {
        F lr, decay;
    };
    struct State {
        F p;
    };

    static State step(State s, F g, Scalars c) {
        if (c.decay != F(0)) g = fused ? fma(s.p, c.decay, g) : g + c.decay * s.p;
        return {fused ? fma(g, -c.lr, s.p) : s.p - c.lr * g};
    }
};

template <typename F>
using SgdMomentum = SgdMomentumStep<F, Profile::ieee>;
template <typename F>
using SgdMomentumTorchFused = SgdMomentumStep<F, Profile::torch_fused>;
template <typename F>
using Sgd = SgdStep<F, Profile::ieee>;
template <typename F>
using SgdTorchFused = SgdStep<F, Profile::torch_fused>;

NEARFLASH_OPTIMIZER(SgdMomentum);
NEARFLASH_OPTIMIZER(Sgd);

}  // namespace nearflash
