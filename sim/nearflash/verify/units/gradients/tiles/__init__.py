"""The tile check: proof and vectors."""
