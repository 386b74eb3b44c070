"""State format as a signal, `form`: StateFormat.code."""

from typing import Any

from amaranth import Mux, Value

from nearflash.abi.optimizers.state import StateFormat

__all__ = ["FORM_BITS", "per_format"]

#: Bits of the register field `state_format`.
FORM_BITS = 2


def per_format(form: Value, fp32: Any, bf16: Any, mx8: Any) -> Value:
    """The value of the format; of a code without one, which the kernel refuses, that of mx8."""
    return Mux(form == StateFormat.FP32.code, fp32, Mux(form == StateFormat.BF16.code, bf16, mx8))
