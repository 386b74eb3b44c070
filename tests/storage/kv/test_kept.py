"""Stores that are closed, or die, and are opened again: which tokens are there, and what is an error."""

import errno
import json
import os
import stat
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore, open_kept_store, read_kept_layout
from nearflash.storage.kv.journal import SequenceJournal, journal_path
from nearflash.storage.kv.recovery import FoundPages
from nearflash.storage.kv.stage import PageStage
from nearflash.storage.kv.statistics import Cause

SHAPE = KvShape(layers=2, kv_heads=3, dim=32)
GEOMETRY = FlashGeometry(4096, 16, 2, 2, 64)


def layout_of(interleaved=True):
    return KvLayout(16, interleaved, 64, IndexFormat.INT4, 4096)


@pytest.fixture(params=[True, False], ids=["interleaved", "separate"])
def reopen(request, tmp_path):
    """Opens the one store of the test, again and again."""

    def open_(**options):
        return open_kept_store(tmp_path / "kv", SHAPE, layout_of(request.param), GEOMETRY, **options)

    open_.path = tmp_path / "kv"
    return open_


def grow(store, sequence, kv, start, end):
    for layer in range(store.shape.layers):
        store.append(sequence, layer, *(x[:, start:end] for x in kv))


def die(store):
    """End a store as a kill does: nothing more is programmed or noted."""
    stage = store._pool.stage
    stage._closed = True
    with suppress(Exception):
        stage._writes.wait()
    stage._writes.close()
    store.flash.close()
    store._journal._out.close()
    store._open = False


def check(stored, store, number, kv, tokens):
    assert store.lengths[number] == tokens
    for layer in range(SHAPE.layers):
        found = stored(store, number, layer)
        at = store.layer(number, layer)
        for got, want in zip(found, kv, strict=True):
            assert np.array_equal(got, want[:, :tokens])
        sums = kv[1][:, :tokens].sum(1, dtype=np.float64)
        assert np.array_equal(at.v_mean, (sums / max(tokens, 1)).astype(np.float32))
        # The index of every whole block is there, and reads.
        pages, blocks = at.index_pages, tokens // 64
        keys = store.pages.index_keys(at.index_tags, layer, range(blocks))
        assert pages.shape[1] == blocks * store.pages.index_layout.pages
        store.read(pages.reshape(-1), keys.reshape(-1))


@pytest.mark.parametrize("suffix_bytes", [0, 1 << 20])
@pytest.mark.parametrize("ends", ["close", "flush", "die"])
def test_sequences_are_there_again(reopen, draw, stored, ends, suffix_bytes):
    """With all tokens; if their user died, with those in full groups."""
    kv, other, more = draw(1, 300), draw(2, 90), draw(3, 60)
    size = 16 if ends == "die" else 1
    lengths = [tokens // size * size for tokens in (205, 40, 265)]
    with reopen() as store:
        first, second = store.add(), store.add()
        grow(store, first, kv, 0, 205)
        grow(store, second, other, 0, 90)
        child = store.fork(first)
        grow(store, child, more, 0, 60)
        store.crop(second, 40)
        store.note(first, {"name": "one"})
        gone = store.add()
        store.free(gone)
        if ends == "flush":
            store.flush()
        if ends != "close":
            die(store)
    assert stat.S_IMODE(journal_path(reopen.path).stat().st_mode) == 0o600
    forked = [np.concatenate([x[:, :205], y], axis=1) for x, y in zip(kv, more, strict=True)]
    for _ in range(2):
        with reopen(suffix_bytes=suffix_bytes) as store:
            assert set(store.lengths) == {first, second, child} and store.notes[first] == {"name": "one"}
            check(stored, store, first, kv, lengths[0])
            check(stored, store, second, other, lengths[1])
            check(stored, store, child, forked, lengths[2])
    with reopen(suffix_bytes=suffix_bytes) as store:
        grow(store, first, kv, lengths[0], 300)
        grow(store, second, other, lengths[1], 90)
        check(stored, store, first, kv, 300)
        check(stored, store, second, other, 90)
        assert store.add() > max(first, second, child)
        for number in list(store.lengths):
            store.free(number)
        assert store.statistics.live_pages == 0


def test_opening_again_gives_room_back_that_died_with_its_user(reopen, draw, stored):
    kv = draw(1, 400)
    with reopen() as store:
        keep = store.add()
        grow(store, keep, kv, 0, 160)
    for round_ in range(15):  # many times what the flash can hold
        with reopen(background=bool(round_ % 2)) as store:
            grow(store, store.add(), kv, 0, 400)
            grow(store, keep, kv, 160, 250)
            store.flush()
            die(store)
        with reopen() as store:
            check(stored, store, keep, kv, 250)
            store.crop(keep, 160)
            for number in set(store.lengths) - {keep}:
                check(stored, store, number, kv, 400)
                store.free(number)


def test_an_index_that_was_not_programmed_is_made_again(reopen, draw, stored):
    kv = draw(1, 200)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 200)
        lost = store.layer(number, 1).index_pages.copy()
    with FileFlash.open(reopen.path) as flash:
        for page in lost.reshape(-1).tolist():  # as if their records had not come to the drive
            flash._spare.put(np.array([page]), np.zeros((1, 8, 8), np.uint8), np.zeros(1, np.uint32))
            flash._write_spare(np.array([page]))
    with reopen() as store:
        check(stored, store, number, kv, 200)


def test_pages_that_a_power_cut_damaged_end_the_sequence_before_them(reopen, draw, stored):
    kv = draw(1, 200)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 200)
        page = int(store.layer(number, 1).token_pages[2, 5])
        offset = store.flash.offset(page)
        store.flush()
        die(store)
    with reopen.path.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\xa5" * 8)
    with reopen() as store:
        check(stored, store, number, kv, 80)
        grow(store, number, kv, 80, 200)  # pages of the old number lie behind: these go by another
        store.flush()
        die(store)
    with reopen() as store:
        check(stored, store, number, kv, 200)


def test_torn_pages_are_looked_for_at_every_opening(reopen, draw, stored):
    """After one clean end they were taken for copies of the valid pages of their keys."""
    kv = draw(1, 64)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 64)
        store.flush()
        offset = store.flash.offset(int(store.layer(number, 1).token_pages[2, 3]))
    assert SequenceJournal.read(journal_path(reopen.path), store.flash.about["store"])[1]
    with reopen() as store:
        die(store)  # so that pages are read
    with reopen.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 9)
    for _ in range(2):
        with reopen() as store:
            check(stored, store, number, kv, 48)
        assert SequenceJournal.read(journal_path(reopen.path), store.flash.about["store"])[1] is None


def test_a_collection_that_was_cut_off_leaves_a_block_to_go_on_with(tmp_path, draw, stored, monkeypatch):
    """Power went between the copies and the erase: no block was free, and the store could not be written to again."""
    geometry = FlashGeometry(4096, 16, 1, 1, 12)
    kv, other = draw(1, 300), draw(2, 300)

    def reopen():
        return open_kept_store(tmp_path / "kv", SHAPE, layout_of(), geometry)

    class Cut(Exception):
        pass

    erase = PageStage.erase

    def cut(stage, block):
        if store.statistics.programmed[Cause.COLLECTION]:
            raise Cut
        erase(stage, block)

    with reopen() as store:
        keep, gone = store.add(), store.add()
        with monkeypatch.context() as patch:
            patch.setattr(PageStage, "erase", cut)
            for end in range(10, 300, 10):
                try:
                    grow(store, keep, kv, end - 10, end)
                    grow(store, gone, other, end - 10, end)
                except Cut:
                    break
                if end == 100:
                    store.crop(gone, 0)
                    gone = store.add()
                    other = tuple(np.roll(x, end, axis=1) for x in other)
            else:
                pytest.fail("nothing was collected")
            store._pool.flush()
            tag = store.layer(keep, 0).page_tag.sequence
            die(store)
    with FileFlash.open(tmp_path / "kv") as flash:  # one of the copies has not come to the drive
        keys = flash.headers(np.arange(geometry.pages))[0]
        _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
        copies = np.flatnonzero((counts[place] == 2) & (keys["sequence"] == tag))
        offset = flash.offset(int(copies.max()))
        found, pages = FoundPages(flash, SHAPE, layout_of(), verify=True), np.flatnonzero(keys["sequence"] == tag)
        redundant = found.redundant_blocks(pages).tolist()
        assert redundant and found.redundant_blocks(np.tile(pages, 2)).tolist() == redundant  # as forks share them
    assert len(copies) > 2
    with (tmp_path / "kv").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 9)
    for _ in range(3):
        with reopen() as store:
            tokens = store.lengths[keep]
            assert tokens >= end - 30
            check(stored, store, keep, kv, tokens)
            for number in set(store.lengths) - {keep}:
                store.free(number)
            again = store.add()
            grow(store, again, other, 0, 90)
            check(stored, store, again, other, 90)


@pytest.mark.parametrize("keep", range(0, 9))
def test_a_journal_that_ends_early_is_an_older_state(reopen, draw, stored, keep):
    """A power cut may take the last lines; whatever is left, each sequence has a beginning of what it once held."""
    kv, other = draw(1, 200), draw(2, 200)
    with reopen() as store:
        first = store.add()
        grow(store, first, kv, 0, 130)
        second = store.fork(first)
        store.crop(first, 40)
        grow(store, first, other, 0, 100)
        store.free(second)
        grow(store, first, other, 100, 160)
        store.crop(first, 150)
    path = journal_path(reopen.path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: keep + 1]) + lines[min(keep + 1, len(lines) - 1)][:-7])
    cropped = [np.concatenate([x[:, :40], y], axis=1) for x, y in zip(kv, other, strict=True)]
    with reopen() as store:
        for number in store.lengths:
            for layer in range(2):
                found, tokens = stored(store, number, layer), store.lengths[number]
                assert any(
                    all(np.array_equal(a, b[:, :tokens]) for a, b in zip(found, want, strict=True))
                    for want in (kv, cropped)
                )


def test_random_changes_of_the_journal_are_an_error_of_ours_or_an_older_state(reopen, draw):
    rng = np.random.default_rng(7)
    with reopen() as store:
        number = store.add()
        grow(store, number, draw(1, 70), 0, 70)
        store.note(number, {"tokens": [1, 2, 3]})
        grow(store, store.fork(number), draw(2, 70), 0, 70)
    path = journal_path(reopen.path)
    whole = path.read_bytes()
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(data)
        try:
            with reopen() as store:
                assert all(tokens in (0, 64, 70, 128, 140) for tokens in store.lengths.values())
        except StateError:
            assert path.read_bytes() == data
        path.write_bytes(whole)


def line(body):
    text = json.dumps(body).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sequence": 9, "freed": True}, "of a sequence of the lines before it"),
        ({"sequence": 0, "token_tags": [[1, 0]], "index_tags": [[0, 0]]}, "rising"),
        ({"sequence": 0, "token_tags": [[0, 0], [0, 1]], "index_tags": [[0, 0]]}, "rising"),
        ({"sequence": 0, "token_tags": [], "index_tags": [[0, 0]]}, "rising"),
        ({"sequence": 0, "token_tags": [[0, -1]], "index_tags": [[0, 0]]}, "integers"),
        ({"sequence": 0, "info": []}, "a table as info"),
        ({"sequence": 0, "partial": [1]}, "tokens, number"),
        ({"sequence": 0, "partial": [-1, 2]}, "integers"),
        ({"sequence": 0, "partial": "1"}, "partial"),
        ({"sequence": 9, "partial": []}, "of a sequence of the lines before it"),
        ({"closed": {"0": [1]}}, "tokens and sums"),
        ({"closed": {"0": [1, "%"]}}, "tokens and sums"),
        ({"closed": {"x": [1, ""]}}, "of a sequence"),
        ([], "object"),
        ({}, "object"),
    ],
)  # fmt: skip
def test_lines_that_make_no_sense_are_named(tmp_path, body, message):
    path = tmp_path / "journal"
    journal = SequenceJournal.create(path, "id")
    store = [line({"version": 1, "store": "id"}), line({"sequence": 0, "token_tags": [[0, 0]], "index_tags": [[0, 0]]})]
    journal.close(None)
    path.write_bytes(b"".join(store) + line(body))
    with pytest.raises(StateError, match=message):
        SequenceJournal.open(path, "id")


def test_other_stores_shapes_layouts_and_files_are_rejected(reopen, tmp_path):
    with reopen() as store:
        store.add()
        layout = store.layout
        with pytest.raises(StateError, match="in use"):
            reopen()
    other = tmp_path / "other"
    open_kept_store(other, SHAPE, layout, GEOMETRY).close()
    with pytest.raises(StateError, match="another model's or policy's"):
        open_kept_store(reopen.path, KvShape(2, 3, 64), layout, GEOMETRY)
    with pytest.raises(StateError, match="another model's or policy's"):
        open_kept_store(reopen.path, SHAPE, layout_of(not layout.interleaved), GEOMETRY)
    assert read_kept_layout(reopen.path) == layout and read_kept_layout(tmp_path / "none") is None
    journal_path(reopen.path).write_bytes(journal_path(other).read_bytes())
    with pytest.raises(StateError, match="keep the two files together"):
        reopen()
    journal_path(reopen.path).write_bytes(b"")
    with pytest.raises(StateError, match="must begin with the line of its store"):
        reopen()
    journal_path(reopen.path).unlink()
    with pytest.raises(StateError, match="readable journal"):
        reopen()
    plain = tmp_path / "plain"
    KvStore(FileFlash.create(plain, GEOMETRY), SHAPE, layout).close()
    with pytest.raises(StateError, match="keeps its sequences"):
        open_kept_store(plain, SHAPE, layout, GEOMETRY)


def test_notes_need_a_journal_and_a_sequence(reopen, make_store):
    with make_store(memory=True) as store:
        assert store.notes == {}
        with pytest.raises(CommandError, match="with a journal"):
            store.note(store.add(), {})
    with reopen() as store, pytest.raises(CommandError, match="sequence"):
        store.note(4, {})


@pytest.mark.parametrize("call", ["open", "replace", "fsync"])
def test_a_journal_that_cannot_be_made_leaves_nothing_behind(reopen, tmp_path, monkeypatch, call):
    """No open file (which the garbage collector closes with a warning), no partial one; what was there stays."""
    with reopen() as store:
        store.add()
    before = journal_path(reopen.path).read_bytes()
    store_id = json.loads(before.splitlines()[0][9:])["store"]

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    opened, journal = [], SequenceJournal.open(journal_path(reopen.path), store_id)
    real = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda *a, **k: opened.append(real(*a, **k)) or opened[-1])
    if call == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(StateError, match="must be writable: No space left"):
        journal.begin()
    monkeypatch.undo()
    assert len(opened) == (call != "open") and all(file.closed for file in opened)
    assert journal_path(reopen.path).read_bytes() == before and not list(tmp_path.glob("*.partial"))


def test_a_journal_that_cannot_be_closed_is_released(tmp_path, monkeypatch):
    journal = SequenceJournal.create(tmp_path / "journal", "id")
    out = journal._out

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("nearflash.storage.kv.journal.os.fsync", fail)
    with pytest.raises(StateError, match="must be writable: Input/output error"):
        journal.close({})
    assert out.closed
    journal.close({})


def test_a_journal_that_cannot_be_written_changes_no_sequence(reopen, draw, stored, monkeypatch):
    kv = draw(1, 100)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 100)

        def fail(*_):
            raise StateError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(SequenceJournal, "_put", fail)
            for call in (store.add, lambda: store.fork(number), lambda: store.crop(number, 20),
                         lambda: store.free(number)):  # fmt: skip
                with pytest.raises(StateError, match="no room"):
                    call()
        check(stored, store, number, kv, 100)
    with reopen() as store:
        check(stored, store, number, kv, 100)


def test_a_journal_without_its_pages_is_not_replaced(reopen, tmp_path):
    """Where the pages are not (moved, or on a disk that is not there) a new store took the conversation's place."""
    with reopen() as store:
        store.note(store.add(), {"messages": ["hello"]})
    reopen.path.rename(tmp_path / "moved")
    before = journal_path(reopen.path).read_bytes()
    with pytest.raises(StateError, match="must not hold sequences where their pages are not"):
        reopen()
    assert journal_path(reopen.path).read_bytes() == before and not reopen.path.exists()
    (tmp_path / "moved").rename(reopen.path)
    with reopen() as store:
        assert list(store.notes.values()) == [{"messages": ["hello"]}]


def test_another_file_in_the_journals_place_is_not_replaced(reopen, tmp_path):
    for make in (lambda file: file.write_text("a list"), lambda file: file.mkdir(), os.mkfifo):
        make(journal_path(reopen.path))
        with pytest.raises(StateError, match="must"):
            reopen()
        assert not reopen.path.exists()
        journal_path(reopen.path).rename(tmp_path / f"other{len(list(tmp_path.iterdir()))}")


@pytest.mark.parametrize("content", [b"", bytes(8192)])
def test_what_a_crash_in_its_making_leaves_is_made_again(reopen, content):
    """Zeros, and a journal without sequences: it was refused for ever."""
    reopen.path.write_bytes(content)
    SequenceJournal.create(journal_path(reopen.path), "0" * 32).close(None)
    assert read_kept_layout(reopen.path) is None
    with reopen() as store:
        assert not store.lengths
