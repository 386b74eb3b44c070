"""Top-K gradient streams to dense gradients."""
