import pytest

pytest.importorskip("torch")

from nearflash.offload.machine import measure
from nearflash.planning.profile import load_machine


@pytest.fixture(autouse=True)
def _known_machine(tmp_path_factory, monkeypatch):
    """No test measures the machine."""
    machine = load_machine("gpu24").with_memory(gpu_bytes=2e9, host_bytes=2e9, disk_bytes=1e9)
    monkeypatch.setattr(measure, "measure_machine", lambda folder, dtype, model: machine)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
