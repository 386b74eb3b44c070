"""A store's two files, of which one is of another time: never two texts in one; and power cuts at opening."""

import itertools

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import StateError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.kv import KvLayout, KvShape, open_kept_store
from nearflash.storage.kv.journal import SequenceJournal, journal_path

SHAPE = KvShape(layers=2, kv_heads=1, dim=32)
LAYOUT = KvLayout(16, True, 64, IndexFormat.INT4, 4096)
GEOMETRY = FlashGeometry(4096, 16, 1, 1, 16)
SECTOR_BYTES = 512


def opened(path, **options):
    return open_kept_store(path, SHAPE, LAYOUT, GEOMETRY, direct=False, **options)


def grow(store, sequence, kv):
    for layer in range(SHAPE.layers):
        store.append(sequence, layer, *kv)


def draw(seed, tokens):
    return np.random.default_rng(seed).standard_normal((2, 1, tokens, 32), dtype=np.float32).astype(np.float16)


def held(store, stored, sequence):
    return np.stack([np.stack(stored(store, sequence, layer)) for layer in range(SHAPE.layers)])


def states(folder, ends="close"):
    """Pages, journal and K and V: after a store was closed, and after each of two copies has gone on."""
    path, found = folder / "kv", {}
    with opened(path) as store:
        sequence = store.add()
        store.note(sequence, {"text": "before"})
        grow(store, sequence, draw(0, 90))
    files = path, journal_path(path)
    copies = [file.read_bytes() for file in files]
    found["before"] = *copies, draw(0, 90)
    for name, seed in (("A", 1), ("B", 2)):
        for file, content in zip(files, copies, strict=True):
            file.write_bytes(content)
        with opened(path) as store:
            store.crop(sequence, 40)
            store.note(sequence, {"text": name})
            grow(store, sequence, draw(seed, 60))
            if ends == "flush":
                store.flush()
                found[name] = *(file.read_bytes() for file in files), ...
        if ends == "close":
            found[name] = *(file.read_bytes() for file in files), ...
        found[name] = *found[name][:2], np.concatenate([draw(0, 90)[:, :, :40], draw(seed, 60)], axis=2)
    return found, sequence


@pytest.mark.parametrize("ends", ["close", "flush"])
def test_files_of_two_branches_are_refused(tmp_path, stored, ends):
    found, sequence = states(tmp_path, ends)
    path = tmp_path / "mixed"
    for pages, journal in itertools.product(found, found):
        path.write_bytes(found[pages][0])
        journal_path(path).write_bytes(found[journal][1])
        if pages == journal:
            with opened(path) as store:
                assert store.notes[sequence] == {"text": pages}
                assert (held(store, stored, sequence) == found[pages][2]).all()
            continue
        with pytest.raises(StateError, match="keep the two files together"):
            opened(path)
        assert path.read_bytes() == found[pages][0] and journal_path(path).read_bytes() == found[journal][1]


@pytest.mark.parametrize("ends", ["close", "flush"])
def test_pages_of_another_branch_are_never_served(tmp_path, stored, ends):
    """Even where the labels agree: a block of a page file may have come out of another copy."""
    found, sequence = states(tmp_path, ends)
    path = tmp_path / "mixed"
    for pages, journal in itertools.permutations(found, 2):
        path.write_bytes(found[journal][0][:BLOCK_BYTES] + found[pages][0][BLOCK_BYTES:])
        journal_path(path).write_bytes(found[journal][1])
        with opened(path) as store:
            kv, tokens = found[journal][2], store.lengths[sequence]
            assert (held(store, stored, sequence) == kv[:, :, :tokens]).all()
            assert (tokens == kv.shape[2]) == (journal == "before")  # whose pages are still there in the others


def test_stores_of_one_model_have_no_page_in_common(tmp_path):
    keys = []
    for name in ("one", "two"):
        with opened(tmp_path / name) as store:
            grow(store, store.add(), draw(0, 90))
            headers, known, _ = store.flash.headers(np.arange(GEOMETRY.pages))
            keys.append({row.tobytes() for row in headers[known]})
    assert keys[0] and not keys[0] & keys[1]


def test_lines_of_another_branch_and_of_other_places_are_refused(tmp_path):
    found, _ = states(tmp_path)
    path = tmp_path / "mixed"
    lines = {name: content[1].splitlines(keepends=True) for name, content in found.items()}
    path.write_bytes(found["A"][0])
    for number in range(1, len(lines["A"])):
        for other in (lines["B"][number], lines["A"][number - 1], lines["A"][number] * 2):
            journal_path(path).write_bytes(b"".join([*lines["A"][:number], other, *lines["A"][number + 1 :]]))
            with pytest.raises(StateError, match="valid checksum"):
                opened(path)


def test_a_power_cut_while_it_is_opened_leaves_the_state_of_before(tmp_path, stored, monkeypatch):
    path = tmp_path / "kv"
    with opened(path) as store:
        sequence = store.add()
        store.note(sequence, {"text": "before"})
        grow(store, sequence, draw(0, 90))
    before, after, journals = path.read_bytes(), b"", [journal_path(path).read_bytes()]
    label, sync = FileFlash.label, FileFlash.sync

    def labelled(flash, about):
        journals.append(journal_path(path).read_bytes())
        label(flash, about)

    def synced(flash):
        nonlocal after
        sync(flash)
        after = path.read_bytes()

    monkeypatch.setattr(FileFlash, "label", labelled)
    monkeypatch.setattr(FileFlash, "sync", synced)
    confirm = SequenceJournal.confirm
    monkeypatch.setattr(SequenceJournal, "confirm", lambda own: (journals.append(journal_path(path).read_bytes()),
                        confirm(own), journals.append(journal_path(path).read_bytes())))  # fmt: skip
    opened(path).close()
    monkeypatch.undo()
    old, begun, still, confirmed = journals
    assert old != begun == still and confirmed.startswith(begun) and before[BLOCK_BYTES:] == after[BLOCK_BYTES:]
    torn = {
        b"".join((after if sectors >> one & 1 else before)[one * SECTOR_BYTES : (one + 1) * SECTOR_BYTES]
                 for one in range(8)) for sectors in range(256)
    }  # fmt: skip
    assert torn == {before[:BLOCK_BYTES], after[:BLOCK_BYTES]}  # a drive writes a sector at once
    images = [(old, before), (begun, before)]
    images += [(confirmed[:end], after) for end in range(len(begun), len(confirmed) + 1)]
    for journal, pages in images:
        path.write_bytes(pages)
        journal_path(path).write_bytes(journal)
        for tokens in (90, 100):
            with opened(path) as store:
                assert store.notes == {sequence: {"text": "before"}}
                kv = np.concatenate([draw(0, 90), draw(3, 10)], axis=2)[:, :, :tokens]
                assert (held(store, stored, sequence) == kv).all()
                if tokens == 90:
                    grow(store, sequence, draw(3, 10))
    for journal, pages in ((old, after), (confirmed, before)):  # no power cut leaves these: they are of two times
        path.write_bytes(pages)
        journal_path(path).write_bytes(journal)
        with pytest.raises(StateError, match="keep the two files together"):
            opened(path)
