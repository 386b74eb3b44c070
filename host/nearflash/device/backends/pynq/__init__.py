"""Device `pynq`: a Zynq board that runs PYNQ."""
