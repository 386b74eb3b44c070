"""The numbers of the attend kernel in exact integers (docs/contracts/attention.md, 1).

Same names as nearflash.gateware.attention.numerics.
"""
