"""Attention engines over stored KV: on the CPU, on a device, over several devices."""
