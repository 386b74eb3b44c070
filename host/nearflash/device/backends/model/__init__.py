"""Backend `model`: the bit-exact reference, for correctness rather than speed."""
