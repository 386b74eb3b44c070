"""Drivers: what a caller does with a device of a kernel, the same on every backend."""
