"""Garbage collection, read disturb and wear: whatever is moved, what is readable is what was appended."""

import numpy as np
import pytest

from nearflash.abi.errors import StorageFullError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.kv.statistics import Cause

LAYERS, GROUP, BLOCK = 2, 16, 64
TAIL_BYTES = BLOCK * 4 * LAYERS * 3 * 32
"""Of one sequence of make_store's shape."""


class Expected:
    """What a store must hold: K and V by sequence and layer, in memory."""

    def __init__(self, store, seed):
        self.store, self.rng = store, np.random.default_rng(seed)
        self.sequences = {}
        self.host_bytes = self.refused = self.forks = 0

    def act(self):
        """One random call."""
        action = self.rng.choice(["add", "append", "append", "append", "token", "free", "flush", "fork", "crop"])
        if action == "add" or not self.sequences:
            shape = self.store.shape
            nothing = np.zeros((shape.kv_heads, 0, shape.dim), np.float16)
            self.sequences[self.store.add()] = [(nothing, nothing)] * LAYERS
        elif action in ("append", "token"):
            self.append(1 if action == "token" else int(self.rng.integers(0, 150)))
        elif action in ("fork", "crop"):
            self.cut(action == "fork")
        elif action == "free":
            number = int(self.rng.choice(list(self.sequences)))
            del self.sequences[number]
            self.store.free(number)
        else:
            self.store.flush()

    def cut(self, fork):
        """Crop a sequence, and then maybe fork it."""
        number = int(self.rng.choice(list(self.sequences)))
        layers = self.sequences[number]
        least = min(k.shape[1] for k, _ in layers)
        length = int(self.rng.choice([least, max(least - 1, 0), self.rng.integers(0, least + 1)]))
        self.store.crop(number, length)
        self.sequences[number] = [(k[:, :length], v[:, :length]) for k, v in layers]
        if fork:
            self.forks += 1
            self.sequences[self.store.fork(number)] = list(self.sequences[number])

    def append(self, tokens):
        number, layer = int(self.rng.choice(list(self.sequences))), int(self.rng.integers(LAYERS))
        size = (2, self.store.shape.kv_heads, tokens, self.store.shape.dim)
        new = self.rng.standard_normal(size, dtype=np.float32).astype(np.float16)
        before = self.store.statistics
        try:
            self.store.append(number, layer, *new)
        except StorageFullError:
            after = self.store.statistics
            assert (before.live_pages, before.host_bytes) == (after.live_pages, after.host_bytes)
            self.refused += 1
            return
        self.host_bytes += new.nbytes
        self.sequences[number][layer] = tuple(
            np.concatenate(pair, axis=1) for pair in zip(self.sequences[number][layer], new, strict=True)
        )

    def check(self, stored):
        """All of it is readable; counts are those of what the flash did."""
        store, used = self.store, []
        for number, layers in self.sequences.items():
            for layer, (k, v) in enumerate(layers):
                found = stored(store, number, layer)
                assert np.array_equal(found[0], k) and np.array_equal(found[1], v)
                at = store.layer(number, layer)
                assert at.tokens == k.shape[1] and at.flash_tokens in {at.tokens // n * n for n in (GROUP, BLOCK)}
                assert np.array_equal(at.suffix_k, k[:, at.flash_tokens :])
                assert np.array_equal(at.suffix_v, v[:, at.flash_tokens :])
                assert at.token_pages.shape[1] == at.tokens // GROUP
                mean = v.sum(axis=1, dtype=np.float64) / max(at.tokens, 1)
                assert np.array_equal(at.v_mean, mean.astype(np.float32))
                blocks = range(at.tokens // BLOCK)
                keys = store.pages.index_keys(at.index_tags, layer, blocks)
                read = store.read(at.index_pages.reshape(-1), keys.reshape(-1))
                direct = store.pages.index_pages(keys, k[:, : len(blocks) * BLOCK])
                assert np.array_equal(read.data, direct.data) and np.array_equal(read.aux, direct.aux)
                groups = at.token_pages[..., None] + np.arange(store.layout.group_pages)
                used += [*groups.reshape(-1).tolist(), *at.index_pages.reshape(-1).tolist()]
        counts = store.statistics
        assert len(set(used)) == counts.live_pages
        assert len(set(used)) == len(used) or self.forks
        assert counts.host_bytes == self.host_bytes


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("interleaved, channels, luns, blocks", [(True, 1, 1, 8), (False, 1, 1, 10), (False, 2, 2, 16)])
def test_random_calls(make_store, stored, interleaved, channels, luns, blocks, background):
    collected = disturbed = erases = refused = 0
    for seed in range(3):
        with make_store(
            memory=True, interleaved=interleaved, channels=channels, luns=luns, blocks=blocks, pages_per_block=16,
            buffer_bytes=12 * 4096, background=background, read_limit=50, suffix_bytes=2 * TAIL_BYTES,
        ) as store:  # fmt: skip
            expected = Expected(store, seed)
            for step in range(150):
                expected.act()
                if step % 10 == 0:
                    expected.check(stored)
            store.flush()
            expected.check(stored)
            counts = store.statistics
            assert np.array_equal(counts.erases, store.flash.erases)
            assert sum(counts.programmed.values()) == store.flash.programmed
            assert counts.write_amplification == pytest.approx(store.flash.programmed * 4096 / expected.host_bytes)
            collected += counts.programmed[Cause.COLLECTION]
            disturbed += counts.programmed[Cause.DISTURB]
            erases, refused = erases + counts.erases.sum(), refused + expected.refused
    assert collected and disturbed and erases and refused


@pytest.mark.parametrize("interleaved", [True, False])
def test_random_calls_on_nand(make_store, stored, interleaved):
    with make_store(nand=True, interleaved=interleaved, blocks=3, pages_per_block=4, read_limit=1) as store:
        expected = Expected(store, seed=9)
        for step in range(150):
            expected.act()
            if step % 20 == 0:
                expected.check(stored)
        expected.check(stored)
        programmed = store.statistics.programmed
        assert programmed[Cause.COLLECTION] + programmed[Cause.DISTURB] > 0


@pytest.mark.parametrize("interleaved", [True, False])
def test_no_key_ever_has_two_contents_on_a_file(make_store, stored, interleaved, monkeypatch):
    """Whatever was programmed since the start: so a scan of its records cannot take one page for another."""
    contents = {}

    def program(flash, pages, batch):
        for key, page in zip(batch.keys, batch.data, strict=True):
            assert contents.setdefault(key.tobytes(), page.tobytes()) == page.tobytes()
        write(flash, pages, batch)

    write = FileFlash.program
    monkeypatch.setattr(FileFlash, "program", program)
    for seed in range(3):
        contents.clear()
        with make_store(interleaved=interleaved, blocks=24, suffix_bytes=2 * TAIL_BYTES) as store:
            expected = Expected(store, seed)
            for step in range(150):
                expected.act()
                if step % 25 == 0:
                    expected.check(stored)
            expected.check(stored)
            assert expected.forks and contents


def test_wear_is_even(make_store, draw):
    with make_store(memory=True, blocks=12, interleaved=True) as store:
        kept = store.add()
        store.append(kept, 0, *draw(1, 40))
        for turn in range(120):
            sequence = store.add()
            store.append(sequence, 0, *draw(turn, 64))
            store.free(sequence)
        erases = np.sort(store.statistics.erases)
        assert erases[-1] - erases[2] <= 2 and erases[2] >= 10  # all but those that hold what is kept


def test_blocks_read_often_are_moved_by_the_next_append_that_fills_a_group(make_store, draw, stored):
    with make_store(memory=True, read_limit=30) as store:
        sequence, (k, v) = store.add(), draw(1, 64)
        store.append(sequence, 0, k, v)
        pages = store.layer(sequence, 0).token_pages.copy()
        for _ in range(11):
            store.count_reads(pages[:, 0])
        size = store.layout.group_tokens
        assert not store.fills_group(sequence, 1, size - 1) and store.fills_group(sequence, 1, size)
        store.append(sequence, 1, k[:, : size - 1], v[:, : size - 1])  # pages may be read meanwhile: none is moved
        assert not store.statistics.programmed[Cause.DISTURB] and not store.fills_group(sequence, 1, 0)
        store.append(sequence, 1, k[:, :1], v[:, :1])
        assert store.statistics.programmed[Cause.DISTURB] == 12
        assert not np.intersect1d(pages, store.layer(sequence, 0).token_pages).size
        assert np.array_equal(stored(store, sequence, 0)[0], k)
        assert store.statistics.reads.max() <= 30
