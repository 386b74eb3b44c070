"""Benches of compressed weights."""
