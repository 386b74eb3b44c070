"""Generation with a KV cache on flash: cache and attention for transformers, engines that attend to it, arrays."""
