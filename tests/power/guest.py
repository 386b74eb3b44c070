"""In the guest: mounts the drive, runs a workload on it, and writes to the drive's end what the workload was told."""

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import MARK_BYTES
from workloads import WORKLOADS

DRIVE = "/dev/nvme1n1"
MOUNTED = Path("/mnt")


def main(workload: str, file_system: str) -> None:
    """Run one workload."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(DRIVE.encode(), str(MOUNTED).encode(), file_system.encode(), 0, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    drive = os.open(DRIVE, os.O_WRONLY | os.O_DIRECT)
    place = os.lseek(drive, 0, os.SEEK_END) - MARK_BYTES
    memory = mmap.mmap(-1, MARK_BYTES)

    def mark(**fields: Any) -> None:
        text = b"NFMARK" + json.dumps(fields).encode()
        memory[:] = text.ljust(MARK_BYTES, b" ")
        os.pwrite(drive, memory, place)

    WORKLOADS[workload].live(MOUNTED, mark)


main(*sys.argv[1:])
