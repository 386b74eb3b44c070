"""Dollars and joules of what a step produces: parts paid off over their use, and electricity.

Joules are of the rated power of all parts, an upper bound, plus those of moved bits where a system's model has them.
Prices and powers: hardware/component.toml and price.toml, each with its date.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nearflash.explore.outcome import Outcome
from nearflash.explore.tables import read_part
from nearflash.explore.wear import SECONDS_PER_YEAR, Price

__all__ = ["Component", "cost_of"]

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Component:
    """A part that is bought: its price at a date, and its rated power."""

    source: str
    date: str
    price_usd: float
    power_w: float


def cost_of(found: Outcome) -> Mapping[str, float | str]:
    """Columns of an outcome: usd of the system, usd_per_million and joules of a token (or step), what joules are of.

    Of training and of passes, a unit is a step or a pass. Empty where the outcome names no parts.
    """
    if not found.parts:
        return {}
    price = read_part(Price, "usual")
    bought = {name: (read_part(Component, name), count) for name, count in found.parts.items()}
    usd = sum(part.price_usd * count for part, count in bought.values())
    usd += price.dollars(found.flash_bytes, found.dram_bytes)
    power = sum(part.power_w * count for part, count in bought.values())
    joules = (power * found.seconds + found.joules) / found.units
    paid = usd * found.seconds / found.units / (price.use_years * SECONDS_PER_YEAR)
    return {
        "usd": usd,
        "usd_per_million": 1e6 * (paid + joules / _JOULES_PER_KWH * price.energy_usd_per_kwh),
        "joules_per_unit": joules,
        "energy_of": "rated power and moved bits" if found.energy_j else "rated power",
    }
