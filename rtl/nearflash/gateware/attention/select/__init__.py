"""Selection: entries from scores, the k largest or a probability mass of them (docs/contracts/attention.md, 1)."""
