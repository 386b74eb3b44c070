"""Bounds of kernels' rates beside simulated ones, and devices with their prices."""

import pytest

from nearflash.abi.errors import PlanError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.device.bitstreams import boards, load_board
from nearflash.explore.studies.kernels import compute_rate, find_fpga


def test_the_bound_of_update_beside_the_simulated_kernel():
    """docs/results/gateware.md: 0.4689 cycles a parameter with one DDR4-2400 channel, 0.2503 with memory to spare."""
    found = compute_rate(CONFIGS["update-smartssd"], 300e6, 19.2e9)
    assert found.units_per_s == pytest.approx(300e6 / 0.4689, rel=0.01) and found.bytes_per_s == 19.2e9
    found = compute_rate(CONFIGS["update-smartssd"], 300e6, 100e9)
    assert found.units_per_s == pytest.approx(300e6 / 0.2503, rel=0.01) and found.bytes_per_s == 30 * found.units_per_s


def test_what_bounds_expand_and_attend():
    found = compute_rate(CONFIGS["expand-pynq-z2"], 80e6, 2.1e9)
    assert (found.units_per_s, found.unit) == (4 * 80e6, "elements")
    assert compute_rate(CONFIGS["expand-pynq-z2"], 80e6, 0.5e9).units_per_s == 0.5e9 / 3.125
    alone, nand = CONFIGS["attend-smartssd"], CONFIGS["attend-zynq7045"]
    assert compute_rate(alone, 100e6, 19.2e9).bytes_per_s == 8 * 100e6, "8 bytes a cycle are read inside"
    links = nand.channels * nand.nand.link_bytes_per_s
    assert compute_rate(nand, 285e6, 1e9).bytes_per_s == links, "pages do not come from memory"
    assert compute_rate(nand, 1e6, 1e9).bytes_per_s == 8 * 8 * 1e6


def test_every_board_has_a_device_with_its_resources():
    for board in map(load_board, boards()):
        found, there = find_fpga(board.part), board.resources
        assert (found.lut_count, found.dsp_count, found.bram_count) == (there.lut, there.dsp, there.bram36), board.name
        assert found.price_usd > 0 and found.date >= "2025"


def test_an_unknown_part():
    with pytest.raises(PlanError, match=r"part must begin with one of xc7z010, .*, not 'xc7a35tcsg324-1'"):
        find_fpga("xc7a35tcsg324-1")
