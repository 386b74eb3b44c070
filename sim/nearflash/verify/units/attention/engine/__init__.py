"""Units of the attention engine."""
