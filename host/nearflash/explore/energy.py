"""Energy of moving bits: read from cells, programmed into them, over the flash interface, to and from DRAM."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Energy"]


@dataclass(frozen=True)
class Energy:
    """Picojoules a bit by what moves it."""

    source: str
    read_pj_per_bit: float
    program_pj_per_bit: float
    interface_pj_per_bit: float
    dram_pj_per_bit: float

    def joules(
        self, *, read: float = 0, programmed: float = 0, interface: float = 0, dram: float = 0
    ) -> Mapping[str, float]:
        """Joules by cause, of bytes."""
        amounts = {
            "flash read": (read, self.read_pj_per_bit),
            "flash program": (programmed, self.program_pj_per_bit),
            "flash interface": (interface, self.interface_pj_per_bit),
            "DRAM": (dram, self.dram_pj_per_bit),
        }
        return {name: moved * 8 * pico * 1e-12 for name, (moved, pico) in amounts.items()}
