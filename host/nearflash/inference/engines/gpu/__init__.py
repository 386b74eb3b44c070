"""Attention of a GPU over KV on flash."""
