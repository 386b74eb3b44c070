"""Benches of the optimizer: a step beside that of others, and what compression and short formats cost in loss."""
