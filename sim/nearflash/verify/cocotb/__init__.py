"""cocotb testbenches: one for each component that has one, at the path of the component."""
