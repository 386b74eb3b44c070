"""A note of a sequence is of the tokens that it was made for, wherever the journal is cut."""

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, open_kept_store
from nearflash.storage.kv.journal import journal_path

SHAPE = KvShape(layers=1, kv_heads=1, dim=32)
LAYOUT = KvLayout(16, True, 64, IndexFormat.INT4, 4096)


def opened(path):
    return open_kept_store(path, SHAPE, LAYOUT, FlashGeometry(4096, 16, 1, 1, 16), direct=False)


def grow(store, sequence, tokens, value):
    kv = np.full((1, tokens, 32), value, np.float16)
    store.append(sequence, 0, kv, kv)


@pytest.mark.parametrize("kept", [16, 40, 46], ids=["whole-groups", "a-part-of-one-in-memory", "what-no-flush-kept"])
def test_a_journal_cut_at_any_line_gives_no_note_of_other_tokens(tmp_path, stored, kept):
    """Between a turn's tags and its note, and before both, the note before named the turn's own pages."""
    path = tmp_path / "kv"
    with opened(path) as store:
        sequence = store.add()
        grow(store, sequence, 45, 1)
        store.note(sequence, {"turn": 1})
        store.flush()
        grow(store, sequence, 2, 1)
        before = journal_path(path).read_bytes().count(b"\n")
        store.crop(sequence, kept)
        store.note(sequence, {"turn": 2})
        grow(store, sequence, 60, 2)
        store.flush()
        lines, pages = journal_path(path).read_bytes().splitlines(keepends=True), path.read_bytes()
    seen = set()
    for count in range(before, len(lines) + 1):
        path.write_bytes(pages)
        journal_path(path).write_bytes(b"".join(lines[:count]))
        with opened(path) as store:
            k = stored(store, sequence, 0)[0][0, :, 0]
            turn = store.notes[sequence]["turn"]
            assert (k == (1 if turn == 1 else np.where(np.arange(k.size) < kept, 1, 2))).all(), (count, turn, k)
            seen.add((turn, k.size))
    assert {turn for turn, _ in seen} == {1, 2}
    assert max(seen) == (2, kept + 60)
