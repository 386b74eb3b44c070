"""The open flow for Xilinx 7-series: yosys, nextpnr, frames of our own, and a bitstream that is read back."""
