import pytest

from nearflash.abi.errors import StateError
from nearflash.offload.machine import machine_file
from nearflash.offload.machine.machine_file import available_bytes, keep_machine, load_kept_machine
from nearflash.planning.profile import load_machine


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def machine():
    return load_machine("t4").with_memory(gpu_bytes=1e6, host_bytes=2e6, disk_bytes=3e6)


def test_a_profile_is_kept_by_drive_and_dtype(tmp_path, machine):
    assert load_kept_machine(tmp_path, "float16") is None
    file = keep_machine(machine, tmp_path, "float16")
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_kept_machine(tmp_path, "float16") == machine
    assert load_kept_machine(tmp_path, "bfloat16") is None and load_kept_machine(tmp_path, None) is None
    keep_machine(machine.with_memory(disk_bytes=1e6), tmp_path, "float16")
    assert load_kept_machine(tmp_path, "float16").memory.disk_bytes == 1e6
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_plan_gets_no_more_than_is_free_now(tmp_path, machine, monkeypatch):
    keep_machine(machine.with_memory(gpu_bytes=40e9, host_bytes=60e9, disk_bytes=1e20), tmp_path, None)
    monkeypatch.setattr(machine_file, "available_bytes", lambda: 50e9)
    memory = load_kept_machine(tmp_path, None).memory
    assert memory.host_bytes <= 40e9 and memory.disk_bytes < 1e19
    if memory.gpu_bytes < 40e9:  # without a GPU both are the host's
        assert memory.gpu_bytes + memory.host_bytes == pytest.approx(40e9)
        assert memory.gpu_bytes / memory.host_bytes == pytest.approx(4 / 6)


def test_a_profile_that_this_version_does_not_read_is_measured_again(tmp_path, machine):
    file = keep_machine(machine, tmp_path, None)
    for text in ("format = 3", file.read_text().replace("[schedule]\n", "[schedule]\nexposed_states = 1.0\n")):
        file.write_text(text)
        assert load_kept_machine(tmp_path, None) is None


def test_unwritable_places_are_errors(tmp_path, machine, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StateError, match="must be writable to keep the machine's profile"):
        keep_machine(machine, tmp_path, None)


def test_names_of_dtypes_cannot_leave_the_folder(tmp_path, machine):
    file = keep_machine(machine, tmp_path, "../../x")
    assert file.parent == tmp_path / "state" / "nearflash" and file.name.startswith("machine-x-")


def test_the_kernel_states_free_memory():
    assert 1 << 20 < available_bytes() < 1 << 50
