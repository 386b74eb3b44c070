"""A NAND channel's controller alone, linked to the simulated channel."""
