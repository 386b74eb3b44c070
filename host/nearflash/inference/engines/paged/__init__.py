"""Attention of the host over pages of KV on flash: reads, cached pages, rows of the index, softmax."""
