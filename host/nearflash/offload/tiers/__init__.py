"""Tiers of memory and the links between them: placement, copies, groups of 4 bits, bytes and seconds counted."""
