"""Wear of cells, and money: program and erase cycles, years, dollars."""

from dataclasses import dataclass

from nearflash.abi.errors import PlanError

__all__ = ["SECONDS_PER_YEAR", "Price", "erase_cycles", "years"]

SECONDS_PER_YEAR = 365.25 * 86400


@dataclass(frozen=True)
class Price:
    """Dollars a GB (10^9 bytes) and a kWh, at a date; years in which a system is paid off."""

    source: str
    date: str
    flash_usd_per_gb: float
    dram_usd_per_gb: float
    energy_usd_per_kwh: float
    use_years: float

    def dollars(self, flash_bytes: float = 0, dram_bytes: float = 0) -> float:
        """Cost of so much of both."""
        return (flash_bytes * self.flash_usd_per_gb + dram_bytes * self.dram_usd_per_gb) / 1e9


def erase_cycles(written_bytes_per_s: float, region_bytes: float, seconds: float, amplification: float = 1.0) -> float:
    """Program and erase cycles of a region that is written evenly. Raises PlanError for a region without room."""
    if region_bytes <= 0:
        raise PlanError(f"region_bytes must be above 0, not {region_bytes}: nothing is left beside the weights")
    return written_bytes_per_s * seconds * amplification / region_bytes


def years(written_bytes_per_s: float, region_bytes: float, endurance: float) -> float:
    """Until cells that stand so many cycles are worn."""
    return endurance / erase_cycles(written_bytes_per_s, region_bytes, SECONDS_PER_YEAR)
