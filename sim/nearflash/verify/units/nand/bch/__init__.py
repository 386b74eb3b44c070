"""Units of the BCH code."""
