"""Bit-exact control half of the attend kernel: descriptors, pages, the scan of the index."""
