"""Units of the NAND controller."""
