"""Benches of inference: accuracy of the attention modes against the flash bytes that they read."""
