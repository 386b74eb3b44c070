"""Gateware in Amaranth: stream elements, bus masters, floating point, the updater and kernel tops."""
