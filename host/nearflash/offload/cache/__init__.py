"""The KV cache of the batches on its tiers."""
