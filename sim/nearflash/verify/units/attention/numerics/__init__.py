"""Units of attention's numerics."""
