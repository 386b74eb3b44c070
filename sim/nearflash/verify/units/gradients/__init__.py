"""Units of Top-K gradients."""
