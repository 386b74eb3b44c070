"""Flash in a file: pages come back checked, erased, damaged and misdirected ones are named, errors leave it closed."""

import errno
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, PageError, StateError, StorageFullError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.page import PageWrites, page_headers, page_keys
from nearflash.storage.io.backend import PositionalBackend
from nearflash.storage.io.queue import QueueBackend
from nearflash.storage.io.sealed import seal, unseal

GEOMETRY = FlashGeometry(4096, 8, 2, 1, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "flash"


def batch(indices, page_bytes=4096, sequence=7, kind=PageKind.TOKEN, seed=1):
    keys = page_keys(sequence, 1, 2, np.asarray(indices), kind)
    aux = np.zeros((len(keys), page_bytes // 512, 8), np.uint8)
    aux[..., 4:] = page_headers(keys, page_bytes, 16, IndexFormat.FP16)
    data = np.random.default_rng(seed).integers(0, 256, (len(keys), page_bytes), dtype=np.uint8)
    return PageWrites(keys, data, aux)


@pytest.mark.parametrize("page_bytes", [4096, 16384, 65536])
@pytest.mark.parametrize("threads, queue", [(1, False), (5, False), (1, True)])
def test_pages_come_back_in_any_order(path, page_bytes, threads, queue):
    geometry = FlashGeometry(page_bytes, 8, 2, 1, 4)
    pages = np.array([0, 1, 2, 8, 9, 3, 24, 10])
    written = batch(range(8), page_bytes)
    with FileFlash.create(path, geometry, threads=threads, backend=QueueBackend() if queue else None) as flash:
        flash.program(pages, written)
        asked = np.random.default_rng(2).permutation(np.arange(8).repeat(2))
        read = flash.read(pages[asked], written.keys[asked])
        assert np.array_equal(read.data, written.data[asked]) and np.array_equal(read.aux, written.aux[asked])
    with FileFlash.open(path, threads=threads) as flash:
        assert flash.geometry == geometry
        read = flash.read(pages, written.keys)
        assert np.array_equal(read.data, written.data)
        with pytest.raises(StateError, match="rising order in an erased block, not page 3"):
            flash.program(np.array([3]), batch([0], page_bytes))


@pytest.mark.parametrize("base", [PositionalBackend, QueueBackend])
def test_pages_next_to_each_other_are_one_transfer(path, base):
    class Counting(base):
        scattered = queued_pages = 0

        def scatter(self, fd, memories, offset):
            self.scattered += 1
            return super().scatter(fd, memories, offset)

        def read_many(self, fd, memory, offsets):
            self.queued_pages += len(memory)
            return super().read_many(fd, memory, offsets)

    backend, written = Counting(), batch(range(8))
    with FileFlash.create(path, GEOMETRY, backend=backend) as flash:
        flash.program(np.arange(8), written)
        flash.read(np.arange(8)[::-1], written.keys[::-1])
        assert (backend.scattered, backend.queued_pages) == (1, 0)
        read = flash.read(np.array([6, 0, 3]), written.keys[[6, 0, 3]])
        assert np.array_equal(read.data, written.data[[6, 0, 3]])
        assert (backend.scattered, backend.queued_pages) == ((1, 3) if backend.queued else (4, 0))


def test_blank_and_erased_pages_are_named(path):
    with FileFlash.create(path, GEOMETRY) as flash:
        written = batch([5, 6])
        with pytest.raises(PageError, match=r"sequence 7, layer 1, head 2, token page 5 is erased.*at page 4 of the"):
            flash.read(np.array([4]), written.keys[:1])
        flash.program(np.array([4, 5]), written)
        flash.read(np.array([4, 5]), written.keys)
        flash.erase(0)
        with pytest.raises(PageError, match=r"token page 6 is erased.*1 more of these pages") as caught:
            flash.read(np.array([5, 4]), written.keys[::-1])
        assert [page for page, _ in caught.value.pages] == [5, 4]
        flash.program(np.array([0]), batch([9]))


def test_another_owners_page_is_named(path):
    with FileFlash.create(path, GEOMETRY) as flash:
        flash.program(np.array([0]), batch([5]))
        with pytest.raises(PageError, match=r"sequence 8, layer 1.* is another's: sequence 7, layer 1, head 2"):
            flash.read(np.array([0]), batch([5], sequence=8).keys)
        with pytest.raises(PageError, match="index page 5 is another's"):
            flash.read(np.array([0]), batch([5], kind=PageKind.INDEX).keys)
        second = batch([5]).keys
        second["first"] = 8
        with pytest.raises(PageError, match=r"token page 5 \(V\) is damaged"):
            flash.read(np.array([0]), second)


@pytest.mark.parametrize("place", ["data", "aux", "checksum"])
def test_a_flipped_bit_is_found(path, place):
    written = batch([5, 6])
    with FileFlash.create(path, GEOMETRY) as flash:
        flash.program(np.array([0, 1]), written)
        zone = flash.offset(8) - 4096
        offset = {"data": flash.offset(1) + 4000, "aux": zone + 128, "checksum": zone + 128 + 64}[place]
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)
    with FileFlash.open(path) as flash:
        flash.read(np.array([0]), written.keys[:1])
        with pytest.raises(PageError, match="token page 6 is damaged: its CRC32C is wrong, at page 1"):
            flash.read(np.array([0, 1]), written.keys)


def test_blocks_of_another_file_do_not_count(tmp_path):
    """A whole block, data and records, of another file's pages of the same keys passed."""
    paths = tmp_path / "own", tmp_path / "other"
    for seed, path in enumerate(paths):
        with FileFlash.create(path, GEOMETRY) as flash:
            flash.program(np.array([0, 1]), batch([5, 6], seed=seed))
            start, stop = flash.offset(0), flash.offset(8)
    own, other = (bytearray(path.read_bytes()) for path in paths)
    own[start:stop] = other[start:stop]
    paths[0].write_bytes(own)
    keys = batch([5, 6]).keys
    with FileFlash.open(paths[0]) as flash:
        assert not flash.valid(np.array([0, 1]), keys).any()
        with pytest.raises(PageError, match="token page 5 is damaged: its CRC32C is wrong, at page 0"):
            flash.read(np.array([0, 1]), keys)


def test_a_file_of_before_has_no_salt(path):
    with FileFlash.create(path, GEOMETRY) as flash:
        flash._salt = np.uint32(0)
        flash.label({"made": "before"})
        flash.program(np.array([0]), batch([5]))
    body = unseal("flash", np.frombuffer(path.read_bytes()[:4096], np.uint8))
    assert body.pop("salt") == 0
    with path.open("r+b") as file:
        file.write(seal("flash", body, 4096).tobytes())
    with FileFlash.open(path) as flash:
        assert np.array_equal(flash.read(np.array([0]), batch([5]).keys).data, batch([5]).data)


def test_only_the_owner_may_read_and_one_process_use_it(path):
    with FileFlash.create(path, GEOMETRY):
        assert path.stat().st_mode & 0o777 == 0o600
        for again in (FileFlash.open, lambda path: FileFlash.create(path, GEOMETRY)):
            with pytest.raises(StateError, match="in use"):
                again(path)


def test_a_flash_is_emptied_and_other_files_are_left_alone(path):
    written = batch([1])
    with FileFlash.create(path, GEOMETRY) as flash:
        flash.label({"for": "a test"})
        flash.program(np.array([0]), written)
    with FileFlash.open(path) as flash:
        assert flash.about == {"for": "a test"}
    with FileFlash.create(path, GEOMETRY) as flash, pytest.raises(PageError, match="erased"):
        flash.read(np.array([0]), written.keys)
    with FileFlash.open(path) as flash:
        assert flash.about == {}
    path.write_bytes(b"precious" * 1024)
    for refused in (FileFlash.open, lambda path: FileFlash.create(path, GEOMETRY)):
        with pytest.raises(StateError, match="must begin with the superblock of a flash"):
            refused(path)
    assert path.read_bytes() == b"precious" * 1024
    path.write_bytes(b"short")
    with pytest.raises(StateError, match="must begin with the superblock of a flash"):
        FileFlash.create(path, GEOMETRY)


@pytest.fixture
def block_device(tmp_path):
    """A loop device of 1 MiB."""
    backing = tmp_path / "backing"
    backing.write_bytes(bytes(1 << 20))
    done = subprocess.run(["losetup", "-f", "--show", backing], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip("loop devices need root")
    yield Path(done.stdout.strip())
    subprocess.run(["losetup", "-d", done.stdout.strip()], check=True, timeout=60)


def test_block_devices(block_device):
    device, written = block_device, batch([1, 2])
    for _ in range(2):
        with FileFlash.create(device, GEOMETRY) as flash:
            with pytest.raises(PageError, match="erased"):
                flash.read(np.array([0]), written.keys[:1])
            flash.program(np.array([0, 1]), written)
            with pytest.raises(StateError, match="busy"):
                FileFlash.open(device)
        with FileFlash.open(device) as flash:
            assert np.array_equal(flash.read(np.array([0, 1]), written.keys).data, written.data)
    with pytest.raises(StorageFullError, match=r"must have \d+ bytes, not 1048576; ask for less"):
        FileFlash.create(device, FlashGeometry(4096, 256, 1, 1, 3))
    with device.open("r+b") as raw:  # a file system that begins at 64 KiB
        raw.write(bytes(4096))
        raw.seek(64 << 10)
        raw.write(b"_BHRfS_M")
    with pytest.raises(StateError, match="must begin with the superblock of a flash"):
        FileFlash.create(device, GEOMETRY)


def test_a_file_cut_short_is_refused(path):
    FileFlash.create(path, GEOMETRY).close()
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(StateError, match=r"must have \d+ bytes, not \d+"):
        FileFlash.open(path)


def test_order_of_programs(path):
    with FileFlash.create(path, GEOMETRY) as flash:
        for pages, message in (([1, 0], "not page 0"), ([0, 0], "not page 0"), ([99], "must lie on the flash")):
            with pytest.raises(StateError, match=message):
                flash.program(np.array(pages), batch(range(len(pages))))
        flash.program(np.array([9, 1]), batch([1, 2]))
        with pytest.raises(StateError, match="not page 8"):
            flash.program(np.array([2, 8]), batch([3, 4]))


def test_data_is_written_before_its_records(path):
    class Full(PositionalBackend):
        left = 1_000

        def write(self, fd, memory, offset):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, memory, offset)

    backend, written = Full(), batch([1, 2])
    with FileFlash.create(path, GEOMETRY, backend=backend) as flash:
        backend.left = 1  # the data
        with pytest.raises(StorageFullError, match="no room while writing"):
            flash.program(np.array([0, 1]), written)
    with FileFlash.open(path) as flash, pytest.raises(PageError, match="erased"):
        flash.read(np.array([0]), written.keys[:1])


def test_a_file_is_no_place_for_a_device(path):
    with FileFlash.create(path, GEOMETRY) as flash, pytest.raises(CommandError, match="in its memory or on its flash"):
        flash.entries(np.array([0]))


def test_arguments(path):
    with pytest.raises(CommandError, match="threads must be at least 1, not 0"):
        FileFlash.create(path, GEOMETRY, threads=0)
    with FileFlash.create(path, GEOMETRY) as flash, pytest.raises(StateError, match="flash must fit 4096 bytes"):
        flash.label({"text": "x" * 5000})


def test_a_flash_that_keeps_something_is_never_emptied(path):
    """A session's file given as a plain file of pages was emptied, the conversation with it."""
    with FileFlash.create(path, GEOMETRY) as flash:
        flash.label({"store": "0" * 32})
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"keeps no sequences.* --session"):
        FileFlash.create(path, GEOMETRY)
    assert path.read_bytes() == before
    with pytest.raises(StateError, match="must fit 512 bytes"), FileFlash.open(path) as flash:
        flash.label({"store": "0" * 512})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [bytes(1 << 20) + b"a disk image", bytes(1 << 20) + b"x" * 4096, b"short", b"y" * 4096]
)
def test_other_files_stay_as_they_are(path, content):
    """Also those that begin with zeros, which a crash in the making of a flash leaves alone."""
    path.write_bytes(content)
    for call in (lambda: FileFlash.create(path, GEOMETRY), lambda: FileFlash.open(path)):
        with pytest.raises(StateError):
            call()
    assert path.read_bytes() == content
    path.write_bytes(bytes(8192))
    FileFlash.create(path, GEOMETRY).close()
