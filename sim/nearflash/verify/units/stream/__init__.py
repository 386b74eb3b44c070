"""Units of stream elements."""
