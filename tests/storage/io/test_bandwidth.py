"""The probe moves the bytes that it says, and leaves nothing behind."""

import pytest

from nearflash.abi.errors import StorageFullError
from nearflash.storage.io.bandwidth import THREADS, Probe
from nearflash.storage.io.direct import DirectFile

BLOCK = 1 << 16


@pytest.fixture
def moved(monkeypatch):
    """(call, block) of each transfer."""
    calls = []
    for name in ("read", "write"):
        real = getattr(DirectFile, name)

        def note(self, offset, memory, name=name, real=real):
            calls.append((name, offset // BLOCK))
            real(self, offset, memory)

        monkeypatch.setattr(DirectFile, name, note)
    return calls


def test_moves_what_is_asked_for(tmp_path, moved):
    with Probe(tmp_path, 9 * BLOCK - 1, block_bytes=BLOCK) as probe:
        assert probe.size_bytes == 9 * BLOCK
        assert probe.write(9 * BLOCK) > 0
        assert sorted(moved) == [("write", i) for i in range(9)]
        moved.clear()
        assert probe.read(11 * BLOCK) > 0
        assert sorted(moved) == sorted(("read", i % 9) for i in range(11))
        moved.clear()
        assert probe.both(2 * BLOCK, 5 * BLOCK) > 0
        assert sorted(moved) == [("read", 0), ("read", 1), *(("write", i) for i in (5, 5, 6, 7, 8))]
    assert list(tmp_path.iterdir()) == []


def test_at_least_as_many_blocks_as_directions(tmp_path):
    with Probe(tmp_path, 1, block_bytes=BLOCK) as probe:
        assert probe.size_bytes == 2 * BLOCK and probe.both(THREADS * BLOCK, BLOCK) > 0


def test_no_room_leaves_nothing(tmp_path):
    with pytest.raises(StorageFullError, match="no room while reserving"):
        Probe(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []
