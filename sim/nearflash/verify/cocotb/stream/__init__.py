"""cocotb testbenches of the stream elements."""
