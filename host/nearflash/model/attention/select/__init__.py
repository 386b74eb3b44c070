"""Bit-exact selection: entries, their keys and weights, the k largest or a probability mass (docs/attention.md, 1)."""
