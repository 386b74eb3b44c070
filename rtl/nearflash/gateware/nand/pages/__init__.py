"""Page operations of the attend kernel: pages programmed, blocks erased, pages read back
(docs/contracts/attention.md, 5)."""
