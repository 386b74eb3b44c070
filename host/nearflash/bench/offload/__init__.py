"""Benches of offloaded generation."""
