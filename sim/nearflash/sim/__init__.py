"""Simulators of the gateware: Amaranth's own, Verilator libraries driven in bursts, cocotb testbenches, the device."""
