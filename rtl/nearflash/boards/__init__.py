"""Kernels on boards: the wrappers around them, and the flows that make bitstreams or packages of them."""
