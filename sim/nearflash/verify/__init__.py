"""Verification: proofs and mutation vectors of each unit, what runs them, cocotb testbenches, fixtures."""
