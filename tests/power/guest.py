"""In the guest: has a store live on a drive, or looks at what a drive has after a power cut."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import FILE_SYSTEM_BYTES, MARK_BYTES
from workloads import WORKLOADS

DRIVE, CASES, LOOP = "/dev/nvme1n1", "/dev/nvme2n1", "/dev/loop0"
MOUNTED = Path("/mnt")
_LIBC = ctypes.CDLL(None, use_errno=True)


def record(workload: str, file_system: str) -> None:
    """Run one workload, and write to the drive's end what is reported to it."""
    _mount(DRIVE, file_system, "")
    drive = os.open(DRIVE, os.O_WRONLY | os.O_DIRECT)
    place = os.lseek(drive, 0, os.SEEK_END) - MARK_BYTES
    memory = mmap.mmap(-1, MARK_BYTES)

    def mark(**fields: Any) -> None:
        text = b"NFMARK" + json.dumps(fields).encode()
        memory[:] = text.ljust(MARK_BYTES, b" ")
        os.pwrite(drive, memory, place)

    WORKLOADS[workload].live(MOUNTED, mark)


def check(workload: str, file_system: str) -> None:
    """Print of each image what is wrong with it, or null."""
    for number, case in enumerate(json.loads(Path(CASES).read_bytes())):
        _loop("-o", str(number * FILE_SYSTEM_BYTES[file_system]), LOOP, DRIVE)
        try:
            wrong = _check_one(workload, file_system, case)
        except Exception as error:  # whatever it is: the image is bad
            wrong = f"{type(error).__name__}: {error}"
        _loop("-d", LOOP)
        print(f"RESULT {json.dumps(wrong)}", flush=True)


def _check_one(workload: str, file_system: str, case: dict[str, Any]) -> str | None:
    _mount(LOOP, file_system, "nouuid" if file_system == "xfs" else "")  # all images have the same one
    try:
        return WORKLOADS[workload].check(MOUNTED, case["marks"], case["following"])
    finally:
        _LIBC.umount(str(MOUNTED).encode())


def _mount(drive: str, file_system: str, options: str) -> None:
    if _LIBC.mount(drive.encode(), str(MOUNTED).encode(), file_system.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"mounting: {os.strerror(ctypes.get_errno())}")


def _loop(*arguments: str) -> None:
    subprocess.run(["/bin/busybox", "losetup", *arguments], check=True)


{"record": record, "check": check}[sys.argv[1]](*sys.argv[2:])
