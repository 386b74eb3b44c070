"""Units of attention."""
