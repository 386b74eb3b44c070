"""Testbenches of nearflash.gateware.top."""
