"""Verification: proofs, mutants, cocotb testbenches, and the vectors that they share."""
