"""A small part of the crash points of deltas; and that the bench notices deltas that are believed."""

import pytest

from nearflash.bench.storage.delta_crashes import delta_crash_points
from nearflash.device.backends.host import delta
from nearflash.storage.state import delta_log
from nearflash.storage.state.safetensors import TensorFile


def test_every_folder_gives_the_weights_or_an_error(tmp_path):
    found = delta_crash_points(tmp_path, steps=4, tries=24, seed=1)
    assert found.bad == [] and found.points > 150 and found.newer > 20


@pytest.mark.full
def test_deltas_that_are_not_compared_with_their_checksums_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(TensorFile, "check", lambda *_: None)
    monkeypatch.setattr(delta._Walk, "check", lambda *_: None)
    found = delta_crash_points(tmp_path, steps=4, tries=80, seed=1)
    assert any("a delta that is not there was read" in wrong for wrong in found.bad)


def test_a_delta_of_a_step_that_was_undone_is_noticed_where_it_is_believed(tmp_path, monkeypatch):
    """As if the new one did not take the place of the old one."""
    real = delta_log.DeltaLog.write

    def write(log, given):
        if not log._path(given.commit).exists():
            real(log, given)

    monkeypatch.setattr(delta_log.DeltaLog, "write", write)
    found = delta_crash_points(tmp_path, steps=3, tries=24, seed=1)
    assert any("other words than those of the step" in wrong for wrong in found.bad)
