"""Attention policies, and calibrated ones."""
