"""The contract between host, model, gateware and HLS: written once, standard library only."""

ABI_VERSION = 1
"""Raised whenever a register, command, format or page layout changes meaning."""
