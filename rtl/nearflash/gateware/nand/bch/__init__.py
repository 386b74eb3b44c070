"""BCH code over GF(2^13), t = 16: parity, syndromes at full rate, and one corrector for several channels."""
