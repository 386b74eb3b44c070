"""Benches of the simulated gateware."""
