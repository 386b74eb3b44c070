"""The KV cache of a block of batches on its tiers: in memory, on disk, in 4 bits; its mover is ahead of the visits."""
