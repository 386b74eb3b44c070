"""The order of computing: the zig-zag over layers and batches in fibers, prefill in parts, stages of ranks."""
