"""Bit-exact decode attention of one KV head, its index, its pages, and the bytes that it reads."""
