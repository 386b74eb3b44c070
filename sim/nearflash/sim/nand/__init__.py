"""Model of NAND channels: parts, the C++ channel's hooks for Python, and components with a NAND link in simulation."""
