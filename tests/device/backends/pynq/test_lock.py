"""The board's lock file: one process, and what it loaded."""

import os
import subprocess
import sys

import pytest

from nearflash.abi.errors import DeviceError
from nearflash.device.backends.pynq.lock import BoardLock

HOLD = """
import sys
from pathlib import Path
from nearflash.device.backends.pynq.lock import BoardLock
lock = BoardLock(Path(sys.argv[1]))
lock.note_loaded("abc /a.bit")
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_has_the_board_until_it_ends(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DeviceError, match=f"held by one process, and process {other.pid} has it: end that one"):
            BoardLock(path)
        other.kill()
        other.wait()
        lock = BoardLock(path)
    assert lock.loaded == "abc /a.bit" and path.read_text() == f"{os.getpid()}\nabc /a.bit\n"
    lock.note_loaded("")
    lock.close()
    again = BoardLock(path)
    assert again.loaded == ""
    again.close()


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "link").symlink_to("elsewhere")
    for path in (tmp_path / "no/lock", tmp_path / "link", tmp_path):
        with pytest.raises(DeviceError, match=r"must be opened by root, not fail \(.*\): use `sudo`"):
            BoardLock(path)
    assert not (tmp_path / "elsewhere").exists()
