"""The commands calibrate, and generate with a KV cache on flash."""
