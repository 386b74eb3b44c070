"""Helpers that every package shares and none owns. Standard library, and the errors of abi."""
