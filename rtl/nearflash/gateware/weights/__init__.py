"""Expanders: compressed gradients and weights to dense ones, as fast as memory takes them."""
