"""Units of selection."""
