"""Reference of the expanders: compressed gradients and weights to dense ones."""
