"""Timing of a NAND channel: what its controller counts and its models keep to.

Names and meanings as in ONFI (Open NAND Flash Interface Specification, rev. 4.2, "Timing Parameters"); the defaults are
those of its timing tables, the array times are the part's.
"""

from dataclasses import dataclass

from nearflash.abi.errors import ConfigError

__all__ = ["NandTiming"]


@dataclass(frozen=True)
class NandTiming:
    """Nanoseconds, unless a name states another unit. Raises ConfigError for a time that is not positive."""

    read_ns: int
    """tR: from the end of 30h to the page in the register; the longest that is usual."""
    program_ns: int
    """tPROG."""
    erase_ns: int
    """tBERS."""
    link_bytes_per_s: int
    """Rate of data bursts."""
    cache_busy_ns: int = 1_000
    """tRCBSY: from the end of 31h or 3Fh to the former page in the cache register, when its sensing is over."""
    reset_ns: int = 10_000
    """tRST: from the end of FFh."""
    command_ns: int = 25
    """tWC: one command or address cycle."""
    preamble_ns: int = 50
    """Preamble and postamble of a data burst together."""
    wb_ns: int = 100
    """tWB: from the last cycle of a command that makes a lun busy to the first status read."""
    adl_ns: int = 400
    """tADL: from the last address cycle to data in."""
    whr_ns: int = 120
    """tWHR: from a status command or its last address cycle to its data."""
    ccs_ns: int = 300
    """tCCS (tWHR2): from E0h to data out."""
    rhw_ns: int = 100
    """tRHW: from the end of data out to the next command."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError(f"{name} must be positive, not {value!r}")

    @staticmethod
    def cycles(time_ns: int, clock_hz: int) -> int:
        """Clock cycles that last at least `time_ns`."""
        return -(-time_ns * clock_hz // 1_000_000_000)
