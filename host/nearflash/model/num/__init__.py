"""The numbers of the attend kernel in exact integers (docs/attention.md, 1): same names as nearflash.gateware.num."""
