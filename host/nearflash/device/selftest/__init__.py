"""A device against the model: what `nearflash selftest` runs."""
