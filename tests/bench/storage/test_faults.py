"""Every fault at every call; and that a store that hides one is noticed."""

import pytest

from nearflash.bench.storage.faults import inject
from nearflash.bench.storage.history import FORMATS
from nearflash.storage.io.direct import DirectFile


@pytest.mark.parametrize(
    ("files", "form"), [(1, "mixed"), pytest.param(2, "mixed", marks=pytest.mark.full), (1, "split")]
)
def test_every_fault_leaves_the_last_step(tmp_path, files, form):
    found = inject(tmp_path, files=files, manifest=FORMATS[form])
    assert found.bad == []
    assert found.injected > 150
    assert list(tmp_path.iterdir()) == []


def test_a_short_transfer_that_is_taken_as_whole_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectFile, "_check_done", lambda *_: None)
    found = inject(tmp_path, files=1)
    assert any("no error was raised" in wrong for wrong in found.bad)
    assert any("not exactly" in wrong for wrong in found.bad)
