"""A drive in closed form and event by event."""

import dataclasses

import pytest

from nearflash.explore.ssd import Ssd
from nearflash.explore.tables import part_names, read_part
from nearflash.verify.fixtures.ssd_events import program_events_s, read_events_s

DRIVES = part_names(Ssd)
PAGES = (1, 7, 8, 9, 17, 64, 100, 333, 1000, 4096, 20_000)


@pytest.fixture(params=DRIVES)
def drive(request):
    return read_part(Ssd, request.param)


@pytest.mark.parametrize("pages", PAGES)
def test_reads_agree_within_a_twentieth(drive, pages):
    assert drive.read_s(pages) == pytest.approx(read_events_s(drive, pages), rel=0.05)


@pytest.mark.parametrize("pages", PAGES)
def test_programs_agree_within_a_twentieth(drive, pages):
    assert drive.program_s(pages) == pytest.approx(program_events_s(drive, pages), rel=0.05)


def test_long_runs_approach_the_rates(drive):
    pages = 64_000
    read = pages * drive.page_bytes / read_events_s(drive, pages)
    assert drive.read_bytes_per_s == pytest.approx(read, rel=0.02)
    programmed = pages * drive.page_bytes / program_events_s(drive, pages)
    assert drive.program_bytes_per_s <= programmed * 1.001
    erases = drive.erase_us / drive.pages_per_block_count / drive.program_us
    assert drive.program_bytes_per_s == pytest.approx(programmed, rel=0.05 + erases)


def test_no_pages_take_no_time(drive):
    assert drive.read_s(0) == drive.program_s(0) == read_events_s(drive, 0) == program_events_s(drive, 0) == 0


def test_one_page_takes_cells_and_link(drive):
    alone = drive.read_us * 1e-6 + drive.transfer_s
    assert drive.read_s(1) == pytest.approx(alone)
    assert read_events_s(drive, 1) == pytest.approx(alone)
    assert program_events_s(drive, 1) == pytest.approx(drive.program_us * 1e-6 + drive.transfer_s)


def test_more_pages_never_take_less(drive):
    for form in (drive.read_s, drive.program_s):
        times = [form(pages) for pages in range(1, 400)]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("change", "factor"),
    [("channels_count", 2), ("luns_count", 2), ("planes_count", 2), ("link_bytes_per_s", 2)],
)
def test_more_hardware_never_reads_slower(drive, change, factor):
    more = dataclasses.replace(drive, **{change: getattr(drive, change) * factor})
    assert more.read_bytes_per_s >= drive.read_bytes_per_s * 0.999
    assert more.program_bytes_per_s >= drive.program_bytes_per_s * 0.999


@pytest.mark.parametrize("change", ["read_us", "overhead_us", "spare_bytes"])
def test_slower_parts_never_read_faster(drive, change):
    less = dataclasses.replace(drive, **{change: getattr(drive, change) * 2 + 1})
    assert less.read_bytes_per_s <= drive.read_bytes_per_s


def test_link_bound_and_cell_bound():
    drive = read_part(Ssd, "slc-low-latency")
    each = drive.page_bytes / drive.transfer_s * drive.channels_count
    assert drive.read_bytes_per_s == pytest.approx(each)
    slow = dataclasses.replace(drive, read_us=1000.0)
    planes = slow.luns_count * slow.planes_count
    per_lun = 1e-3 + slow.planes_count * slow.transfer_s
    assert slow.read_bytes_per_s == pytest.approx(slow.channels_count * planes * slow.page_bytes / per_lun)


def test_spare_bytes_and_commands_cost_what_the_notes_say():
    drive = read_part(Ssd, "instinfer")
    assert drive.raw_bytes_per_s == pytest.approx(11.2e9)
    assert drive.read_bytes_per_s / 1e9 == pytest.approx(7.9, abs=0.05)
    large = read_part(Ssd, "instinfer-16k")
    assert large.read_bytes_per_s / 1e9 == pytest.approx(9.3, abs=0.1)


@pytest.mark.parametrize(("name", "planes"), [("instinfer-16k", 4), ("instinfer", 15)])
def test_planes_that_hide_sensing(name, planes):
    """dies x planes a channel >= rate x tR / page: 4 of 16 KB pages, 15 of 4 KB ones, at 45 us."""
    drive = read_part(Ssd, name)
    needed = drive.link_bytes_per_s * drive.read_us * 1e-6 / drive.page_bytes
    assert needed == pytest.approx(planes, rel=0.1)


def test_bytes_of_a_drive():
    drive = read_part(Ssd, "nvmevirt-970pro")
    assert drive.flash_bytes == 8 * 2 * 1 * 1024 * 256 * 32768
