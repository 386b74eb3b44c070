"""Benches of offloaded generation: its plan, and its runtime."""
