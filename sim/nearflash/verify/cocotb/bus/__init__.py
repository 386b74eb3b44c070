"""cocotb testbenches of the bus components."""
