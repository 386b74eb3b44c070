// Adam and AdamW in the operation orders of docs/contracts/numerics.md.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {

template <typename F, Profile Order, bool Decoupled>
struct AdamStep {
    struct Scalars {
        F beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
        F step_size;  // lr / (1 - beta1^t)
        F root;       // sqrt(1 - beta2^t); its inverse in the order of DeepSpeed
        F decay;      // AdamW: factor of p; in the order of DeepSpeed that of what is added to p. Adam: weight decay
        F decays;     // 0: no decay
    };
    struct State {
        F p, m, v;
    };

    static State step(State s, F g, Scalars c) {
        constexpr bool fused = Order != Profile::ieee;
        F p = s.p;
        if (c.decays != F(0)) {
            if constexpr (!Decoupled)
                g = fused ? fma(p, c.decay, g) : g + c.decay * p;
            else
                p = Order == Profile::deepspeed ? fma(p, c.decay, p) : p * c.decay;
        }
        if constexpr (Order == Profile::ieee) {
            const F m = c.beta1 * s.m + c.one_minus_beta1 * g;
            const F v = c.beta2 * s.v + (c.one_minus_beta2 * g) * g;
            return {p - c.step_size * (m / (sqrt(v) / c.root + c.eps)), m, v};
        } else if constexpr (Order == Profile::torch_fused) {
            const F m = fma(c.one_minus_beta1, g - s.m, s.m);
            const F v = fma(c.one_minus_beta2 * g, g, c.beta2 * s.v);
            return {p - (c.step_size * m) / (sqrt(v) / c.root + c.eps), m, v};
        } else {
            const F m = fma(g, c.one_minus_beta1, c.beta1 * s.m);
            const F v = fma(g * g, c.one_minus_beta2, c.beta2 * s.v);
            return {fma(m / fma(sqrt(v), c.root, c.eps), -c.step_size, p), m, v};
        }
    }
};

template <typename F>
using AdamW = AdamStep<F, Profile::ieee, true>;
template <typename F>
using Adam = AdamStep<F, Profile::ieee, false>;
template <typename F>
using AdamWTorchFused = AdamStep<F, Profile::torch_fused, true>;
template <typename F>
using AdamTorchFused = AdamStep<F, Profile::torch_fused, false>;
template <typename F>
using AdamWDeepSpeed = AdamStep<F, Profile::deepspeed, true>;
template <typename F>
using AdamDeepSpeed = AdamStep<F, Profile::deepspeed, false>;

NEARFLASH_OPTIMIZER(AdamW);

}  // namespace nearflash
