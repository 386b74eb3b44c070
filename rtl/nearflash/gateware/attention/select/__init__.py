"""Selection: entries from scores, the k largest or a probability mass of them (docs/attention.md, 1)."""
