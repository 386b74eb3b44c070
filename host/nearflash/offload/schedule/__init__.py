"""What is computed when: the zig-zag over layers and batches, prefill in parts, pipelines of ranks."""
