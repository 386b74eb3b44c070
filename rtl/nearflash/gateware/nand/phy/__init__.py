"""PHYs: from a NAND link to the pads of a part."""
