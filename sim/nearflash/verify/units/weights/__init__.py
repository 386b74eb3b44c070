"""Units of compressed weights."""
