"""Mixed fleets: parameters by the drives' rates."""

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.systems.fleet import fleet_step
from nearflash.explore.systems.smart_infinity import Training, training_step
from nearflash.explore.tables import what_if


def seconds(near, plain, **given):
    return fleet_step("gpt2-8.4b", near, plain, **given).seconds


def test_one_kind_alone():
    assert seconds(6, 0) == pytest.approx(training_step(Training(method="nearflash", drives=6)).phases["state write"])
    assert seconds(0, 2) == pytest.approx(12 * 8.4e9 / (2 * 2.85e9))


def test_plain_drives_stop_at_the_shared_link():
    times = [seconds(0, plain) for plain in (1, 2, 4, 8, 16)]
    assert times[1] == pytest.approx(times[0] / 2)
    assert times[3] == times[4] > times[0] / 8


def test_drives_that_compute_do_not():
    times = [seconds(near, 0) for near in (1, 2, 4, 8, 16)]
    assert times == pytest.approx([times[0] / count for count in (1, 2, 4, 8, 16)])


@pytest.mark.parametrize(("near", "plain"), [(1, 1), (2, 4), (4, 2), (1, 20)])
def test_rates_add_up(near, plain):
    assert 1 / seconds(near, plain) == pytest.approx(1 / seconds(near, 0) + 1 / seconds(0, plain))


@pytest.mark.parametrize(("near", "plain"), [(1, 1), (2, 4), (3, 0), (0, 3)])
def test_stripes_are_the_whole(near, plain):
    found = fleet_step("gpt2-8.4b", near, plain)
    assert sum(found.memory_bytes.values()) == pytest.approx(12 * 8.4e9)
    assert found.fits
    assert set(found.memory_bytes) == {
        name for name, count in (("drives that compute", near), ("plain drives", plain)) if count
    }


def test_only_plain_drives_state_crosses_the_link():
    assert fleet_step("gpt2-8.4b", 4, 0).traffic_bytes["shared link"] == 0
    assert fleet_step("gpt2-8.4b", 0, 4).traffic_bytes["shared link"] == pytest.approx(24 * 8.4e9)
    half = fleet_step("gpt2-8.4b", 1, 1).traffic_bytes["shared link"]
    assert half == pytest.approx(12 * 8.4e9)


def test_smaller_states_are_faster():
    assert seconds(2, 2, optimizer="adam-bf16") == pytest.approx(seconds(2, 2) * 8 / 12)


def test_a_full_drive_does_not_fit():
    with what_if({"smartssd.smartssd.flash_bytes": 1e10}):
        assert not fleet_step("gpt2-33b", 1, 1).fits


@pytest.mark.parametrize(("near", "plain"), [(0, 0), (-1, 2), (2, -1)])
def test_fleets_that_cannot_be(near, plain):
    with pytest.raises(PlanError, match="near and plain must be 0 or more and 1 drive in all"):
        fleet_step("gpt2-8.4b", near, plain)
