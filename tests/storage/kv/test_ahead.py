"""The journal goes ahead of the pages: what accounts for a page is durable before it is programmed, or it never is."""

import errno
import os

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import StateError, StorageFullError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.kv import KvLayout, KvShape, open_kept_store
from nearflash.storage.kv.journal import SequenceJournal, journal_path

SHAPE = KvShape(layers=2, kv_heads=1, dim=32)
LAYOUT = KvLayout(16, True, 64, IndexFormat.INT4, 4096)


@pytest.fixture
def reopen(tmp_path):
    """Opens the one store of the test, again and again."""
    geometry = FlashGeometry(4096, 8, 1, 1, 12)
    return lambda **options: open_kept_store(tmp_path / "kv", SHAPE, LAYOUT, geometry, direct=False, **options)


def grow(store, sequence, tokens, seed=0):
    kv = np.random.default_rng(seed).standard_normal((2, 1, tokens, 32), dtype=np.float32).astype(np.float16)
    for layer in range(SHAPE.layers):
        store.append(sequence, layer, *kv)


@pytest.fixture
def calls(monkeypatch):
    """Programs, erases and journal lines in their order, and after which line the journal was durable: [line, …]."""
    seen = []
    put, sync, program, erase = SequenceJournal._put, SequenceJournal.sync, FileFlash.program, FileFlash.erase

    def wrapped(name, real):
        def call(own, *a):
            result = real(own, *a)
            seen.append(name)
            return result

        return call

    def synced(own):
        durable = own._synced
        sync(own)
        if own._synced > durable:
            seen.append("sync")

    monkeypatch.setattr(SequenceJournal, "_put", wrapped("line", put))
    monkeypatch.setattr(SequenceJournal, "sync", synced)
    monkeypatch.setattr(FileFlash, "program", wrapped("page", program))
    monkeypatch.setattr(FileFlash, "erase", wrapped("page", erase))
    return seen


def unsynced_pages(calls):
    """Programs and erases with lines before them that were not durable."""
    last = {"line": -1, "sync": -1}
    wrong = 0
    for place, what in enumerate(calls):
        wrong += what == "page" and last["line"] > last["sync"]
        last[what] = place
    return wrong


@pytest.mark.parametrize("background", [False, True])
def test_every_line_is_durable_before_the_pages_after_it(reopen, calls, background):
    rng = np.random.default_rng(5)
    with reopen(background=background) as store:
        for number in range(60):
            alive = list(store.lengths) or [store.add()]
            one = int(rng.choice(alive))
            store.note(one, {"turn": number})
            action = rng.choice(["grow", "grow", "crop", "fork", "free", "flush"])
            try:
                if action == "grow":
                    grow(store, one, int(rng.integers(1, 60)), number)
                elif action == "crop":
                    store.crop(one, int(rng.integers(store.lengths[one] + 1)))
                elif action == "flush":
                    store.flush()
                else:
                    getattr(store, action)(one)
            except StorageFullError:
                store.crop(one, 0)
                for other in set(alive) - {one}:
                    store.free(other)
    assert calls.count("page") > 20 and store.statistics.erases.sum()
    assert background or not unsynced_pages(calls)  # a page in the background may be of before the last line


def test_tokens_after_a_note_take_one_sync_and_others_none(reopen, calls):
    with reopen() as store:
        sequence = store.add()
        store.note(sequence, {"turn": 0})
        grow(store, sequence, 64)
        calls.clear()
        store.crop(sequence, 40)
        store.note(sequence, {"turn": 1})
        grow(store, sequence, 40)
        assert calls.count("sync") == 1
        for _ in range(40):  # tokens of the reply
            grow(store, sequence, 1)
        assert calls.count("sync") == 1 and calls.count("page") >= 6


@pytest.mark.parametrize("background", [False, True])
def test_without_a_durable_journal_no_page_is_programmed(reopen, calls, monkeypatch, background):
    """fsync reports lost lines once: the next one returns, and they are lost all the same."""
    real, fails = os.fsync, [OSError(errno.EIO, "Input/output error")]

    def fsync(descriptor):
        if fails:
            raise fails.pop()
        real(descriptor)

    store = reopen(background=background)
    sequence = store.add()
    store.note(sequence, {"turn": 0})
    grow(store, sequence, 16)
    store.flush()
    store.note(sequence, {"turn": 1})
    calls.clear()
    monkeypatch.setattr(os, "fsync", fsync)

    def more():
        grow(store, sequence, 32)
        store.flush()  # what a thread met is raised here, or before

    for call in (more, more, store.flush, lambda: store.note(sequence, {}), store.close):
        with pytest.raises(StateError, match="must be writable: Input/output error"):
            call()
    store.close()
    assert not fails and not calls
    with reopen() as store:
        assert store.lengths == {sequence: 16}


def test_after_pages_that_were_not_flushed_no_flush_is_done(reopen, monkeypatch):
    """A second flush of the file would return, and what the first one lost would be promised."""
    flush, fails = DirectFile.flush, [StateError("flushing failed")]

    def failing(file):
        if fails:
            raise fails.pop()
        flush(file)

    with pytest.raises(StateError, match="flushing failed"), reopen() as store:
        sequence = store.add()
        grow(store, sequence, 20)
        monkeypatch.setattr(DirectFile, "flush", failing)
        for _ in range(2):
            with pytest.raises(StateError, match="flushing failed"):
                store.flush()
    with reopen() as store:
        assert store.lengths == {sequence: 16}


def test_a_line_that_cannot_be_taken_back_ends_the_journal(tmp_path, monkeypatch):
    """Half a line stood there, and could not be cut off: the next line was joined to it, and the journal was lost."""
    journal = SequenceJournal.create(tmp_path / "journal", "id")

    class Full:
        def __init__(self, file):
            self.fileno, self.close, self._file = file.fileno, file.close, file

        def write(self, line):
            return self._file.write(line[:7])

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    out = journal._out
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_out", Full(out))
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(StateError, match="No space left"):
            journal._put({"sequence": 0})
    for call in (lambda: journal._put({"sequence": 0}), journal.sync):
        with pytest.raises(StateError, match="No space left"):
            call()
    journal.close(None)
    assert SequenceJournal.read(tmp_path / "journal", "id") == ({}, None)


def test_a_store_that_cannot_note_its_end_is_released(reopen, monkeypatch):
    store = reopen()
    sequence = store.add()
    grow(store, sequence, 16)

    def fail(*_):
        raise StateError("no room")

    with monkeypatch.context() as patch, pytest.raises(StateError, match="no room"):
        patch.setattr(SequenceJournal, "_put", fail)
        store.close()
    with reopen() as store:
        assert store.lengths == {sequence: 16}


def test_a_file_that_is_linked_to_has_one_journal(reopen, tmp_path):
    """It lay beside the link: the file's own was of another opening from then on."""
    with reopen() as store:
        sequence = store.add()
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(tmp_path / "kv")
    assert journal_path(link) == journal_path(tmp_path / "kv")
    with open_kept_store(link, SHAPE, LAYOUT, FlashGeometry(4096, 8, 1, 1, 12), direct=False) as store:
        grow(store, sequence, 20)
    with reopen() as store:
        assert store.lengths == {sequence: 20}
    assert [file.name for file in link.parent.iterdir()] == ["link"]
