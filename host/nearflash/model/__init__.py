"""Bit-exact reference of the gateware, in numpy: same packages and names, equality to the bit."""
