"""Bit-exact Top-K gradient streams."""
