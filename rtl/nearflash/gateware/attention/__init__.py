"""The attend kernel: control, channel engines, selection, numerics."""
