"""Formal proofs of the stream elements and the bus masters: benches, properties and the runner."""
