"""The digest of a file: read once, again after any change, and never believed from what others can write."""

import os
import time

import pytest

from nearflash.abi.errors import StateError
from nearflash.identity import file_digest, files


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of what was read before, and how many files were read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_STEP_NS", -1)  # as if every file had been written long ago
    monkeypatch.setattr(files, "_PART_BYTES", 1000)
    read, found = files._read, []
    monkeypatch.setattr(files, "_read", lambda *given: (found.append(1), read(*given))[1])
    return tmp_path / "cache" / "nearflash" / "digests", found


def weights(tmp_path, content=bytes(2500)):
    path = tmp_path / "weights"
    path.write_bytes(content)
    return path


def test_a_file_is_read_once_and_again_after_any_change(tmp_path, kept):
    path, (folder, read) = weights(tmp_path), kept
    first = file_digest(path)
    assert file_digest(path) == first and len(read) == 1
    (own,) = folder.iterdir()
    assert own.stat().st_mode & 0o777 == 0o600
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(2400)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # in place, with its old time put back
    second = file_digest(path)
    assert second != first and len(read) == 2
    path.unlink()
    assert file_digest(weights(tmp_path)) == first, "content decides, in which file ever"


def test_a_file_changed_within_the_clocks_step_is_not_kept(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(files, "_STEP_NS", 3_000_000_000)
    assert file_digest(weights(tmp_path)) and not kept[0].exists()


@pytest.mark.parametrize(
    "change", [lambda p: p.chmod(0o666), lambda p: p.write_text("{"), lambda p: p.write_text("[]")]
)
def test_what_others_can_write_or_is_damaged_is_not_believed(tmp_path, kept, change):
    path, (folder, read) = weights(tmp_path), kept
    first = file_digest(path)
    (own,) = folder.iterdir()
    change(own)
    assert file_digest(path) == first and len(read) == 2


def test_a_file_that_changes_while_it_is_read_and_what_is_no_file_are_errors(tmp_path, kept, monkeypatch):
    path, read = weights(tmp_path), files._read
    monkeypatch.setattr(files, "_read", lambda *given: (path.write_bytes(bytes(time.time_ns() % 99)), read(*given))[1])
    with pytest.raises(StateError, match="must stay as it is while it is read"):
        file_digest(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none", ""):
        with pytest.raises(StateError, match="must be readable to be compared"):
            file_digest(tmp_path / name)
