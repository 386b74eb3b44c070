"""fp32 arithmetic to the bit: results and IEEE 754 exceptions of the gateware units of the same names."""
