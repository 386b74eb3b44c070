"""The profile of this machine, kept from one measurement to the next plan; reading it loads no torch.

One TOML file (0600) a drive and model: $XDG_STATE_HOME/nearflash/machine-….toml, ~/.local/state by default.
"""

import os
import re
import shutil
from pathlib import Path

from nearflash.abi.errors import PlanError, StateError
from nearflash.planning.profile import Machine, load_machine, machine_toml
from nearflash.support.files import write_durably
from nearflash.support.folders import user_folder

__all__ = ["FREE_SHARE", "available_bytes", "keep_machine", "load_kept_machine"]

FREE_SHARE = 0.8
"""Of free memory and of the drive's free room that a plan may fill."""


def available_bytes() -> int:
    """Free memory of the host, by the kernel's estimate."""
    match = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
    return int(match[1]) << 10 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def keep_machine(machine: Machine, folder: Path, what: str | None) -> Path:
    """Keep what was measured in a folder for a model, `what`, in place of an older profile; its file.

    Raises StateError.
    """
    file = _file(folder, what)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(file, machine_toml(machine))
    except OSError as error:
        raise StateError(f"{file} must be writable to keep the machine's profile: {error.strerror}") from error
    return file


def load_kept_machine(folder: Path, what: str | None) -> Machine | None:
    """The profile kept for a folder's drive and a model, with no more memory than is free now; None where none is that
    this version reads.
    """
    file = _file(folder, what)
    if not file.exists():
        return None
    try:
        machine = load_machine(file)
    except PlanError:  # damaged, or of another version: measured again
        return None
    memory = machine.memory
    free = available_bytes() * FREE_SHARE
    gpu_bytes = memory.gpu_bytes
    if not Path("/proc/driver/nvidia/version").exists():
        # What computes is host memory, too: both shrink by what others took meanwhile.
        gpu_bytes *= min(1.0, free / (memory.gpu_bytes + memory.host_bytes))
        free -= gpu_bytes
    free_disk = shutil.disk_usage(folder).free * FREE_SHARE
    return machine.with_memory(
        gpu_bytes=gpu_bytes, host_bytes=min(memory.host_bytes, free), disk_bytes=min(memory.disk_bytes, free_disk)
    )


def _file(folder: Path, what: str | None) -> Path:
    number = folder.stat().st_dev
    dtype = re.sub(r"\W", "", what or "default")
    return user_folder("XDG_STATE_HOME") / f"machine-{dtype}-{os.major(number)}-{os.minor(number)}.toml"
