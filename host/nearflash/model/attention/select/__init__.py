"""Bit-exact selection: entries, their keys and weights, the k largest or a probability mass
(docs/contracts/attention.md, 1)."""
