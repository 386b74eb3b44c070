"""Device `xrt`: a PCIe card with an XRT platform (SmartSSD, Alveo)."""
