"""Attention in the drive over KV on its flash."""
