"""Decode attention: from page requests to partial sums."""
