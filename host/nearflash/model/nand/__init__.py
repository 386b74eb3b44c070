"""Codewords: CRC, BCH code and scrambling, over whole arrays of codewords (docs/contracts/attention.md, 2)."""
