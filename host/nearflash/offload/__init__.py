"""Generation with models larger than memory: weights, KV cache and activations on tiers."""
