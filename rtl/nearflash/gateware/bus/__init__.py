"""AXI4 masters for streams, the AXI4-Lite register file and the kernel control words."""
