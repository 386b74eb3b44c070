"""Linux's figures of this process. Sources: proc(5), getrusage(2)."""

import ctypes
from pathlib import Path

__all__ = ["fields", "give_memory_back", "peak_resident_bytes", "reset_peak", "resident_bytes"]

_FOLDER = Path("/proc/self")


def fields(name: str) -> dict[str, str]:
    """The fields of a file of /proc/self whose lines are `key: value`, such as status and io."""
    lines = (_FOLDER / name).read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def resident_bytes() -> int:
    """Memory that the process has resident now (VmRSS)."""
    return int(fields("status")["VmRSS"].split()[0]) << 10


def give_memory_back() -> None:
    """Have freed memory go back to the system, where the C library can (malloc_trim, 3)."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def peak_resident_bytes() -> int:
    """Most memory that the process had resident since its program began, or since `reset_peak` (VmHWM).

    Not getrusage's ru_maxrss: a program that fork and exec began has in it what the parent had at the fork.
    """
    return int(fields("status")["VmHWM"].split()[0]) << 10


def reset_peak() -> None:
    """The peak of resident memory is what is resident now (clear_refs, 5)."""
    (_FOLDER / "clear_refs").write_text("5")
