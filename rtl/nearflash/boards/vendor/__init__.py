"""Packages for vendor tools: flat Verilog of kernels, kernel.xml, Tcl, constraints, and how the tools are run."""
