"""Files that are refused, and left as they are."""

import pytest

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import LostStepWarning, StateError
from nearflash.storage import StateStore
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.sealed import seal
from nearflash.storage.state.superblock import STATE_VERSION

SIZE = 225_280


def overwrite(offset, data):
    def change(content):
        content[offset : offset + len(data)] = data

    return change


def misdirected(content):
    content[:] = b"\x89PNG" * (len(content) // 4)


def other(key, value):
    body = {"version": STATE_VERSION, "abi": ABI_VERSION, "stamp": {"step": 4}} | {key: value}
    return overwrite(0, seal("superblock", body).tobytes())


def shorten(to_bytes):
    def change(content):
        del content[to_bytes:]

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (misdirected, "must begin with a nearflash superblock"),
        (overwrite(0, bytes(2 * BLOCK_BYTES)), "must begin with a nearflash superblock"),
        (overwrite(0, b"nearflash.superblock junk" + bytes(2 * BLOCK_BYTES - 25)), "both superblocks are damaged"),
        (other("version", 5), "must have version 4, not 5"),
        (other("version", 2), "must have version 4, not 2; use the nearflash release that wrote it"),
        (other("abi", 99), f"must have abi {ABI_VERSION}, not 99"),
        (shorten(-1), "whole number of 4096-byte blocks"),
        (shorten(-BLOCK_BYTES), f"must have {SIZE} bytes, not {SIZE - BLOCK_BYTES}"),
        (shorten(2 * BLOCK_BYTES), "at least 3, not 8192"),
        (shorten(0), "at least 3, not 0"),
        (lambda content: content.extend(bytes(BLOCK_BYTES)), f"must have {SIZE} bytes, not {SIZE + BLOCK_BYTES}"),
        (overwrite(2 * BLOCK_BYTES + 100, b"@"), "the manifest at offset 8192 is damaged"),
        (overwrite(20 * BLOCK_BYTES + 100, b"@"), "the checksum table at offset 81920 is damaged"),
    ],
)
def test_bad_files_are_refused_untouched(path, change, message):
    content = bytearray(path.read_bytes())
    assert len(content) == SIZE
    change(content)
    path.write_bytes(content)
    with pytest.raises(StateError, match=message):
        StateStore.open([path])
    assert path.read_bytes() == content


def test_missing_file_is_named(tmp_path):
    with pytest.raises(StateError, match="not a missing one"):
        StateStore.open([tmp_path / "none"])
    with pytest.raises(StateError, match="not one that is no regular file"):
        StateStore.open([tmp_path])


def test_a_damaged_newest_superblock_is_told(path):
    """The step before had been opened without a word."""
    content = bytearray(path.read_bytes())
    content[BLOCK_BYTES + 100] ^= 1  # of step 3; step 2 lies in the first block
    path.write_bytes(content)
    with pytest.warns(LostStepWarning, match="is at step 2; the superblock of step 3 is damaged"):
        store = StateStore.open(path)
    with store:
        assert store.steps == 2


def test_a_damaged_older_superblock_is_no_loss(path):
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with StateStore.open(path) as store:
        assert store.steps == 3
