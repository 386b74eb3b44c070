"""Units of bus components."""
