"""Benches of storage: crashes at every point, and faults at every call."""
