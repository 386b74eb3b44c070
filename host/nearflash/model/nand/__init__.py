"""Codewords: CRC, BCH code and scrambling, over whole arrays of codewords (docs/attention.md, 2)."""
