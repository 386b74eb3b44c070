"""Zynq-7000: the processor system, and a kernel between its ports."""
