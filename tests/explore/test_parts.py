"""Links, rooflines, energy, price, wear, and what an outcome adds up."""

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.energy import Energy
from nearflash.explore.links import Link, raid0_rate
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Cpu, Gpu, Npu
from nearflash.explore.tables import read_part
from nearflash.explore.wear import SECONDS_PER_YEAR, Price, erase_cycles, years


def test_a_link_reaches_its_share():
    link = Link("test", 10e9, 0.5)
    assert link.seconds(10e9) == pytest.approx(2.0)


def test_a_shared_link_stops_scaling():
    link = read_part(Link, "pcie-expansion")
    rates = [raid0_rate(3.3e9, drives, link) for drives in range(1, 11)]
    assert rates[:3] == pytest.approx([3.3e9, 6.6e9, 9.9e9])
    assert rates[3] == pytest.approx(13.2e9, rel=0.001)
    assert rates[4:] == [link.bytes_per_s] * 6


def test_the_roofs_of_a_gpu():
    gpu = Gpu("test", 1e9, memory_bytes_per_s=100.0, fp16_flops_per_s=1000.0)
    assert gpu.seconds(flops=2000, moved_bytes=100) == 2.0
    assert gpu.seconds(flops=2000, moved_bytes=100, reached=0.5) == 4.0
    assert gpu.seconds(flops=2000, moved_bytes=900) == 9.0


def test_an_npu_is_slower_elementwise():
    npu = read_part(Npu, "kvnand")
    assert npu.matrix_seconds(16e12) == pytest.approx(1.0)
    assert npu.vector_seconds(32e12) == pytest.approx(64.0)


def test_memory_bounds_the_update():
    cpu = read_part(Cpu, "xeon-6342")
    assert cpu.seconds(204.8e9) == pytest.approx(1 / 0.85)


def test_energy_of_bits():
    energy = read_part(Energy, "flash-and-dram")
    joules = energy.joules(read=1e12 / 8, programmed=2e12 / 8, interface=3e12 / 8, dram=4e12 / 8)
    assert joules == pytest.approx(
        {"flash read": 3.0, "flash program": 15.0, "flash interface": 14.7, "DRAM": 28.0}
    )  # fmt: skip
    assert sum(energy.joules().values()) == 0


def test_a_byte_read_through_the_interface_costs_more_than_one_of_dram():
    energy = read_part(Energy, "flash-and-dram")
    assert energy.joules(read=1, interface=1).values() and energy.read_pj_per_bit < energy.dram_pj_per_bit
    assert energy.read_pj_per_bit + energy.interface_pj_per_bit > energy.dram_pj_per_bit


def test_dollars():
    price = read_part(Price, "usual")
    assert price.dollars(flash_bytes=100e9) == pytest.approx(72.0)
    assert price.dollars(flash_bytes=100e9, dram_bytes=1e9) == pytest.approx(72.0 + price.dram_usd_per_gb)


def test_cycles_of_a_region():
    assert erase_cycles(1e6, 1e9, 1e6) == pytest.approx(1000)
    assert erase_cycles(1e6, 1e9, 1e6, amplification=2) == pytest.approx(2000)
    assert years(1e6, 1e9, endurance=1e6 * SECONDS_PER_YEAR / 1e9) == pytest.approx(1.0)


def test_more_room_wears_less():
    cycles = [erase_cycles(1e6, region, SECONDS_PER_YEAR) for region in (1e9, 2e9, 4e9)]
    assert cycles == sorted(cycles, reverse=True)
    assert cycles[0] == pytest.approx(4 * cycles[2])


@pytest.mark.parametrize("region", [0, -1e9])
def test_a_region_without_room(region):
    with pytest.raises(PlanError, match="region_bytes must be above 0"):
        erase_cycles(1e6, region, 1.0)


def outcome(**given):
    return Outcome("system", "model", {"read": 3.0, "compute": 1.0}, **given)


def test_an_outcome_adds_its_phases():
    found = outcome(units=8, hidden={"write": 2.0}, energy_j={"read": 1.5, "DRAM": 0.5})
    assert found.seconds == 4.0
    assert found.rate == 2.0
    assert found.joules == 2.0
    assert found.share("read") == 0.75
    assert found.share("read", "compute", "absent") == 1.0


@pytest.mark.parametrize(
    ("held", "fits"),
    [({"GPU": 10.0}, True), ({"GPU": 11.0}, False), ({"GPU": 1.0, "drive": 1e18}, True), ({}, True)],
)
def test_an_outcome_fits_its_tiers(held, fits):
    assert outcome(memory_bytes=held, capacity_bytes={"GPU": 10.0}).fits is fits
