"""Offloaded inference by layers."""

import dataclasses

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.systems.layered import LayeredHost, Placement, bitmap_fraction, layer_pass


@pytest.fixture(scope="module")
def host():
    return LayeredHost.endor()


def seconds(host, layers, **given):
    return layer_pass("opt-66b", layers, host, **given).seconds


@pytest.mark.parametrize(("bits", "fraction"), [(16, 0.5625), (8, 0.625), (4, 0.75)])
def test_bytes_of_a_bitmap(bits, fraction):
    assert bitmap_fraction(bits) == fraction


@pytest.mark.parametrize(("bits", "density"), [(32, 0.5), (16, -0.1), (16, 1.1)])
def test_a_bitmap_of_other_widths(bits, density):
    with pytest.raises(PlanError, match="bits must be 4, 8 or 16 and density between 0 and 1"):
        bitmap_fraction(bits, density)


def test_layers_cost_more_the_farther_they_lie(host):
    tiers = [Placement(gpu=1), Placement(cpu=1), Placement(ssd=1)]
    times = [seconds(host, each) for each in tiers]
    assert times == sorted(times)
    assert times[2] > 3 * times[1]


def test_a_pass_is_the_sum_of_its_layers(host):
    whole = seconds(host, Placement(5, 8, 51))
    parts = (
        5 * seconds(host, Placement(gpu=1)) + 8 * seconds(host, Placement(cpu=1)) + 51 * seconds(host, Placement(ssd=1))
    )
    assert whole == pytest.approx(parts)


def test_a_layer_from_the_drive_by_hand(host):
    layer = 2.0385e9
    found = layer_pass("opt-66b", Placement(ssd=1), host)
    assert found.phases["drive"] == pytest.approx(layer / 2.55e9, rel=0.001)
    assert found.phases["host to GPU"] == pytest.approx(layer / 10.2e9, rel=0.001)
    assert found.phases["expand"] == 0
    packed = layer_pass("opt-66b", Placement(ssd=1), host, stored_fraction=0.5625)
    assert packed.phases["drive"] == pytest.approx(0.5625 * found.phases["drive"])
    assert packed.phases["expand"] == pytest.approx(layer / 46e9, rel=0.001)


def test_direct_transfers_skip_host_memory(host):
    through, direct = (layer_pass("opt-66b", Placement(ssd=10), host, direct=each) for each in (False, True))
    assert direct.phases["host to GPU"] == 0
    assert direct.seconds == pytest.approx(through.seconds - through.phases["host to GPU"])
    assert direct.traffic_bytes["drive"] == through.traffic_bytes["drive"]


def test_remapped_layers_save_time(host):
    packed = {"stored_fraction": bitmap_fraction()}
    moved = [seconds(host, Placement(5, cpu, 59 - cpu), **packed) for cpu in (8, 14, 20)]
    assert moved == sorted(moved, reverse=True)


def test_sparser_weights_are_faster(host):
    times = [seconds(host, Placement(ssd=4), stored_fraction=bitmap_fraction(16, each)) for each in (0.2, 0.5, 0.8)]
    assert times == sorted(times)
    assert times[2] < seconds(host, Placement(ssd=4)) * 1.1


def test_expanding_what_saves_nothing_costs(host):
    slow = dataclasses.replace(host, expander=dataclasses.replace(host.expander, output_bytes_per_s=1e9))
    assert seconds(slow, Placement(ssd=1), stored_fraction=0.5625) > seconds(slow, Placement(ssd=1))


def test_what_each_tier_holds(host):
    found = layer_pass("opt-66b", Placement(5, 8, 51), host)
    assert found.fits
    assert found.memory_bytes["drive"] == pytest.approx(51 * 2.0385e9, rel=0.001)
    crowded = layer_pass("opt-66b", Placement(20, 8, 36), host)
    assert not crowded.fits
    packed = layer_pass("opt-66b", Placement(5, 40, 19), host, stored_fraction=0.5625)
    assert packed.fits
    assert not layer_pass("opt-66b", Placement(5, 40, 19), host).fits


@pytest.mark.parametrize("layers", [(-1, 2, 3), (0, 0, 0)])
def test_layers_that_cannot_be(layers):
    with pytest.raises(PlanError, match="layers must be 0 or more on each tier and 1 in all"):
        Placement(*layers)


def test_more_layers_than_there_are(host):
    with pytest.raises(PlanError, match="layers must be 64 at most for opt-66b, not 65"):
        layer_pass("opt-66b", Placement(ssd=65), host)
