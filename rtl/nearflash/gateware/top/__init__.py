"""Kernels: register block, memory ports, and what lies between."""
