"""Rates of drives that are kept: found by folder, replaced, and read strictly."""

import json
import stat

import pytest

from nearflash.abi.errors import StateError
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import DriveProfile, find_profile, keep_profile

RATES = (
    Rate("read", 1 << 20, 2, 3.0, 2.5, 3.5), Rate("random", 4096, 1, 0.05, 0.04, 0.06),
    Rate("random", 4096, 32, 0.5, 0.4, 0.6), Rate("random", 65536, 32, 2.0, 1.5, 2.5),
)  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "drives.json"


def test_kept_rates_are_found_by_any_folder_of_the_drive(tmp_path, file):
    assert find_profile(tmp_path, file) is None
    assert keep_profile(tmp_path, [Rate("read", 4096, 1, 1.0, 1.0, 1.0)], "2026-01-01", file) == file
    keep_profile(tmp_path, RATES, "2026-02-03", file)
    (tmp_path / "inside").mkdir()
    assert find_profile(tmp_path / "inside", file) == DriveProfile("2026-02-03", RATES)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(json.loads(file.read_text())["drives"]) == 1 and len(list(file.parent.iterdir())) == 1


@pytest.mark.parametrize(
    "size, depth, rate", [(4096, 1, 0.05), (4096, 64, 0.5), (8192, 32, 0.5), (1 << 20, 32, 2.0), (2048, 32, 0.25)]
)
def test_the_rate_is_that_of_the_nearest_request(size, depth, rate):
    profile = DriveProfile("2026-02-03", RATES)
    assert profile.rate("random", size, depth) == rate and profile.fastest("random") == 2.0
    with pytest.raises(StateError, match="must have been measured for write"):
        profile.rate("write", size, depth)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda body: body.update(version=2), "must have version 1, not 2"),
        (lambda body: body.pop("drives"), "must have drives"),
        (lambda body: rates_of(body)[0].update(median="3"), r"rates\[0\].median must be a number, not '3'"),
        (lambda body: rates_of(body)[0].update(median=-1.0), "must be a positive number, not -1.0"),
        (lambda body: rates_of(body)[0].update(call="trim"), "call must be read, write or random"),
        (lambda body: rates_of(body)[0].pop("depth"), r"rates\[0\] must have depth"),
        (lambda body: rates_of(body).append(None), r"rates\[4\] must be a table, not None"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, change, message):
    keep_profile(tmp_path, RATES, "2026-02-03", file)
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    with pytest.raises(StateError, match=rf"the drives' rates in .*drives\.json.*{message}"):
        find_profile(tmp_path, file)
    with pytest.raises(StateError):
        keep_profile(tmp_path, RATES, "2026-02-03", file)


def rates_of(body):
    return next(iter(body["drives"].values()))["rates"]


def test_what_is_no_json_and_places_that_cannot_be(tmp_path, file):
    file.parent.mkdir()
    file.write_text("{")
    with pytest.raises(StateError, match="must be a readable JSON file"):
        find_profile(tmp_path, file)
    with pytest.raises(StateError, match="must be writable to keep the drive's rates"):
        keep_profile(tmp_path, RATES, "2026-02-03", file / "below")
