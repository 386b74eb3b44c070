"""Page operations of the attend kernel: pages programmed, blocks erased, pages read back (docs/attention.md, 5)."""
