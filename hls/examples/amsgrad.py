"""AMSGrad (Reddi, Kale and Kumar 2018) with AdamW's decay: what amsgrad.hpp computes, and its scalars."""

from dataclasses import dataclass

import numpy as np

from nearflash.sim.hls.rule import HlsRule


@dataclass(frozen=True, kw_only=True)
class Amsgrad(HlsRule):
    """Hyper-parameters of one step."""

    ARRAYS = ("m", "v", "vmax")

    def scalars(self):
        """Fields of the struct's Scalars."""
        b1, b2, t = 0.9, 0.999, self.step
        return {"beta1": b1, "one_minus_beta1": 1 - b1, "beta2": b2, "one_minus_beta2": 1 - b2, "eps": 1e-8,
                "step_size": self.lr / (1 - b1**t), "root": np.sqrt(1 - b2**t),
                "decay": 1 - self.lr * self.weight_decay}  # fmt: skip

    @staticmethod
    def update(c, g, p, m, v, vmax):
        """The step."""
        m = c.beta1 * m + c.one_minus_beta1 * g
        v = c.beta2 * v + (c.one_minus_beta2 * g) * g
        vmax = np.where(vmax > v, vmax, v)
        return c.decay * p - c.step_size * (m / (np.sqrt(vmax) / c.root + c.eps)), m, v, vmax
