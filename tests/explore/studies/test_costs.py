"""Dollars and joules of what a step produces."""

import re

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.outcome import Outcome
from nearflash.explore.studies.costs import Component, cost_of
from nearflash.explore.studies.sweeps import compare_systems, row_of
from nearflash.explore.systems.fleet import fleet_step
from nearflash.explore.tables import part_names, read_part, what_if
from nearflash.explore.wear import Price


def test_costs_by_hand():
    """A GPU and a drive, 2 s for 4 tokens; five years of seconds pay the price off."""
    found = Outcome("a", "m", {"all": 2.0}, units=4, parts={"t4": 1, "ssd": 2}, flash_bytes=1e9, dram_bytes=2e9)
    costs = cost_of(found)
    assert costs["usd"] == pytest.approx(2300 + 2 * 430 + 0.72 + 8)
    assert costs["joules_per_unit"] == pytest.approx((70 + 2 * 6.2) * 2 / 4)
    paid = costs["usd"] * 0.5 / (5 * 365.25 * 86400)
    assert costs["usd_per_million"] == pytest.approx(1e6 * (paid + costs["joules_per_unit"] / 3.6e6 * 0.08))
    assert costs["energy_of"] == "rated power"


def test_moved_bits_come_on_top():
    found = Outcome("a", "m", {"all": 1.0}, energy_j={"flash read": 3.0}, parts={"npu": 1})
    assert cost_of(found)["joules_per_unit"] == pytest.approx(13.0)
    assert cost_of(found)["energy_of"] == "rated power and moved bits"


def test_a_system_without_parts_has_no_price():
    assert cost_of(Outcome("a", "m", {"all": 1.0})) == {}
    with pytest.raises(PlanError, match="component must be one of a100"):
        cost_of(Outcome("a", "m", {"all": 1.0}, parts={"abacus": 1}))


def test_every_system_has_costs():
    for outcomes in compare_systems().values():
        for found in outcomes:
            row = row_of(found)
            assert row["usd_per_million"] > 0 and row["joules_per_unit"] > 0
    assert cost_of(fleet_step("gpt2-8.4b", 2, 3))["usd"] == pytest.approx(4029 + 2 * 1500 + 3 * 400)


@pytest.mark.parametrize("name", part_names(Component))
def test_prices_have_dates(name):
    assert re.fullmatch(r"20\d\d(-\d\d)?", read_part(Component, name).date)
    assert re.fullmatch(r"20\d\d(-\d\d)?", read_part(Price, "usual").date)


def test_another_price():
    found = Outcome("a", "m", {"all": 1.0}, parts={"a6000": 1})
    with what_if({"component.a6000.price_usd": 3000}):
        assert cost_of(found)["usd"] == 3000
