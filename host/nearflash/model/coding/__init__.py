"""Bit-exact checksums."""
