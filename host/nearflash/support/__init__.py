"""Helpers that every package shares and none owns. Standard library only; imports nothing of nearflash."""
