"""Optimizer steps on the host's vector units: equal to nearflash.model.update to the bit, and many times as fast."""
