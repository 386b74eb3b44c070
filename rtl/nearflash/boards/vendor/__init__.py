"""Packages for vendor tools: flat Verilog of the kernels, kernel.xml, Tcl, constraints, and the tools that read them."""
