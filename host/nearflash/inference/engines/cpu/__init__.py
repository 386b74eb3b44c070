"""Attention of the host's CPU over KV on flash."""
