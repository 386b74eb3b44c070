"""torch's functions of vectors, made ready before several threads call them."""

import functools
import sys

__all__ = ["FUNCTIONS", "prepare_vector_math"]

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log2", "log10", "sin", "sqrt", "tan"),
    *("tanh", "trunc"),
)
"""Those that torch has of MKL's vector library. Source: ATen/cpu/vml.h."""


@functools.cache
def prepare_vector_math() -> None:
    """Call each function once in this thread alone, in fp32 and fp64; once a process.

    MKL before 2025 chooses a function's code at its first call. Where several threads make it together, as for the
    rotary embedding of the first prompt, one of them may compute with the code of fewer bits: relative errors of 1e-4,
    in a few of a hundred processes. Source: pytorch/pytorch, issue 188792.
    To be called where torch is imported.
    """
    torch = sys.modules["torch"]
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)
