"""Gradients on their way to the device: norm, loss scale, Top-K compression."""
