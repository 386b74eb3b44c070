"""Direct I/O: alignment, short transfers, full disks, locks."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.errors import AlignmentError, StateError, StorageFullError
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.direct import DirectFile, aligned_buffer


def pattern(blocks, seed=1):
    memory = aligned_buffer(blocks * BLOCK_BYTES)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.nbytes, dtype=np.uint8)
    return memory


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_come_back(tmp_path, direct):
    data, back = pattern(5), aligned_buffer(5 * BLOCK_BYTES)
    with DirectFile.create(tmp_path / "f", 8 * BLOCK_BYTES, direct=direct) as file:
        file.write(2 * BLOCK_BYTES, data)
        file.flush()
        assert file.size_bytes == 8 * BLOCK_BYTES
    with DirectFile.open(tmp_path / "f", direct=direct) as file:
        file.read(2 * BLOCK_BYTES, back)
    assert np.array_equal(data, back)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_direct_io_passes_the_page_cache(tmp_path):
    with DirectFile.create(tmp_path / "f", BLOCK_BYTES) as file:
        info = Path(f"/proc/self/fdinfo/{file._fd}").read_text()
    assert int(info.split("flags:")[1].split()[0], 8) & os.O_DIRECT


@pytest.mark.parametrize("step_bytes", [BLOCK_BYTES, 3 * BLOCK_BYTES + 512])
def test_short_transfers_are_continued(tmp_path, monkeypatch, step_bytes):
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, v, o: real_read(fd, [v[0][:step_bytes]], o))
    monkeypatch.setattr(os, "pwritev", lambda fd, v, o: real_write(fd, [v[0][:step_bytes]], o))
    data, back = pattern(10), aligned_buffer(10 * BLOCK_BYTES)
    with DirectFile.create(tmp_path / "f", data.nbytes) as file:
        file.write(0, data)
        file.read(0, back)
    assert np.array_equal(data, back)


def test_misaligned_requests_are_refused(tmp_path):
    memory = aligned_buffer(2 * BLOCK_BYTES)
    with DirectFile.create(tmp_path / "f", 2 * BLOCK_BYTES) as file:
        with pytest.raises(AlignmentError, match="offset of direct I/O must be a multiple of 4096, not 512"):
            file.write(512, memory)
        with pytest.raises(AlignmentError, match="length"):
            file.read(0, memory[:512])
        with pytest.raises(AlignmentError, match="address"):
            file.read(0, memory[16 : 16 + BLOCK_BYTES])


def test_reading_past_the_end_is_an_error(tmp_path):
    with DirectFile.create(tmp_path / "f", BLOCK_BYTES) as file:
        with pytest.raises(StateError, match="must have 8192 bytes at offset 0, not 4096"):
            file.read(0, aligned_buffer(2 * BLOCK_BYTES))


def test_file_system_without_direct_io_is_named(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StateError, match=r"must be on a file system with O_DIRECT.*direct=False"):
        DirectFile.create(tmp_path / "f", BLOCK_BYTES)
    DirectFile.create(tmp_path / "f", BLOCK_BYTES, direct=False).close()


def test_missing_permission_is_named(tmp_path):
    with pytest.raises(StateError, match=r"cannot be opened \(No such file"):
        DirectFile.open(tmp_path / "none")


def test_a_link_in_the_place_of_a_new_file_is_named(tmp_path):
    """It was "Too many levels of symbolic links"; nothing is written where the link leads."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(
        StateError, match=f"{link} must be a file .*, not a link to {tmp_path / 'gone'}, where nothing is"
    ):
        DirectFile.create(link, BLOCK_BYTES)
    assert list(tmp_path.iterdir()) == [link]


def test_full_disk_removes_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match="no room while reserving 4096 bytes"):
        DirectFile.create(tmp_path / "f", BLOCK_BYTES)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_really_full_disk(small_disk):
    with pytest.raises(StorageFullError, match="No space left"):
        DirectFile.create(small_disk / "f", 2 << 20, direct=False)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("number, expected", [(errno.ENOSPC, StorageFullError), (errno.EIO, StateError)])
def test_engine_errors_name_file_and_offset(tmp_path, number, expected):
    class Broken(PositionalBackend):
        def write(self, fd, memory, offset):
            raise OSError(number, os.strerror(number))

    with DirectFile.create(tmp_path / "f", 2 * BLOCK_BYTES, backend=Broken()) as file:
        with pytest.raises(expected, match=r"4096 bytes of .*/f at offset 4096") as caught:
            file.write(BLOCK_BYTES, aligned_buffer(BLOCK_BYTES))
    assert type(caught.value) is expected


def test_only_one_holder(tmp_path):
    with DirectFile.create(tmp_path / "f", BLOCK_BYTES):
        with pytest.raises(StateError, match="in use by another process, or open in this one already: close it there"):
            DirectFile.open(tmp_path / "f")
    DirectFile.open(tmp_path / "f").close()


def test_a_creation_that_stalled_spares_the_finished_file(tmp_path, monkeypatch):
    """It had opened the partial file before another process finished it and gave it its name, and then emptied it."""
    real = DirectFile.lock

    def late(file):
        monkeypatch.setattr(DirectFile, "lock", real)
        with DirectFile.open(tmp_path / "x.partial", direct=False) as other:
            other._reserve(8192)
        (tmp_path / "x.partial").rename(tmp_path / "x")
        real(file)

    monkeypatch.setattr(DirectFile, "lock", late)
    with DirectFile.create(tmp_path / "x.partial", 4096, direct=False) as file:
        assert file.size_bytes == 4096
    assert (tmp_path / "x").stat().st_size == 8192 and (tmp_path / "x.partial").stat().st_size == 4096


def test_a_file_that_is_always_replaced(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(4096))
    monkeypatch.setattr("os.path.samestat", lambda *_: False)
    for call in (lambda: DirectFile.open(tmp_path / "x"), lambda: DirectFile.create(tmp_path / "x", 4096)):
        with pytest.raises(StateError, match="must stay the file that was opened"):
            call()
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_other_kinds_of_files_are_rejected_and_stay(tmp_path, kind):
    """A device node had been removed."""
    path = tmp_path / "node"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making a device node needs root")
    for call in (lambda: DirectFile.open(path, direct=False), lambda: DirectFile.create(path, 4096, direct=False)):
        with pytest.raises(StateError, match="must be a file or a block device"):
            call()
    assert path.exists()


def test_a_file_that_was_there_stays_when_there_is_no_room(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "x").write_bytes(b"somebody's")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError):
        DirectFile.create(tmp_path / "x", 4096, direct=False)
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("end", ["close", "die"])
def test_forked_children_keep_no_lock(tmp_path, end):
    """Workers of a DataLoader had: the state could not be opened again while they lived."""
    script = (
        "import os, sys, time; from pathlib import Path; from nearflash.storage.io.direct import DirectFile\n"
        "file = DirectFile.create(Path(sys.argv[1]), 4096, direct=False)\n"
        "child = os.fork()\n"
        "if not child:\n    os.close(1); time.sleep(60); os._exit(0)\n"  # else the reader waits for it
        "print(child, flush=True)\n"
        "if sys.argv[2] == 'close':\n"
        "    file.close(); DirectFile.open(Path(sys.argv[1]), direct=False).close(); print('again', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "x", end], stdout=subprocess.PIPE, text=True)
    child, *said = done.stdout.split()
    try:
        assert said == (["again"] if end == "close" else [])
        os.kill(int(child), 0)  # it lives
        DirectFile.open(tmp_path / "x", direct=False).close()
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_child_leaves_the_parents_lock(tmp_path):
    with DirectFile.create(tmp_path / "x", 4096, direct=False):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(StateError, match="in use by another process"):
            DirectFile.open(tmp_path / "x", direct=False)


@pytest.mark.parametrize("size_bytes", [10_000, 2 * BLOCK_BYTES, 100, 0])
def test_a_read_counts_the_bytes_of_the_last_block_of_a_file(tmp_path, size_bytes):
    """They were left out where the file ends inside a block."""
    path, memory = tmp_path / "f", aligned_buffer(4 * BLOCK_BYTES)
    path.write_bytes(bytes(size_bytes))
    with path.open("rb") as file:
        assert PositionalBackend().read(file.fileno(), memory.data, 0) == size_bytes
