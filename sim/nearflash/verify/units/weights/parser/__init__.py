"""The matrix parser: proof and vectors."""
