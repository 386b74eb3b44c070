"""Device `zynq`: a Zynq-7000 board under any Linux, without PYNQ."""
