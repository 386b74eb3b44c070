"""Heads read from their pages: the same results as from arrays, and faults of what was read, of nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import SEALED_BYTES, PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.model.attention.control.pages import PageSource
from nearflash.model.attention.head import attend_from
from nearflash.model.attention.memory.image import head_image, image_bytes
from nearflash.model.attention.memory.placement import MemoryStore
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.memory.traffic import traffic
from nearflash.model.attention.random_vectors import MODES, random_mode_vector, random_vector

CHANNELS = 3


class Memory:
    """Pages of one head, by address."""

    def __init__(self, vector):
        store = MemoryStore(0, CHANNELS)
        self.image = head_image(vector.k, vector.v, vector.settings, vector.page_tag, store)
        self.bytes = np.zeros(image_bytes(vector.settings, len(vector.k)), np.uint8)
        self.image.copy_to_memory(self.bytes, 0)
        self.lost = set()

    def legal(self, entries):
        return (entries >> np.uint64(48) & np.uint64(0xFF)) < CHANNELS

    def read(self, entries, pages, codewords):
        codewords *= pages
        addresses = [PageEntry.unpack(int(entry)).address for entry in entries]
        size = codewords * SEALED_BYTES
        found = [self.bytes[a : a + size].reshape(codewords, SEALED_BYTES) for a in addresses]
        lost = [[a in self.lost] * codewords for a in addresses]
        return np.array(found, np.uint8).reshape(-1, codewords, SEALED_BYTES), np.array(lost, bool).reshape(
            -1, codewords
        )


def run(vector, memory, **tables):
    image = memory.image
    found = {"index_table": image.index_table, "token_table": image.token_table} | tables
    source = PageSource(vector.settings, vector.page_tag, len(vector.k), **found, reader=memory)
    return attend_from(source, vector.q, vector.v_mean, vector.settings), source.read


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_pages_change_nothing(mode, seed):
    rng = np.random.default_rng([seed, *mode.encode()])
    dim, group, tokens = int(rng.choice([20, 64, 128])), int(rng.integers(1, 5)), int(rng.integers(1, 400))
    vector = random_mode_vector(rng, mode, dim, group, tokens, PageTag(seed, 3, 1))
    wanted = vector.result()
    found, read = run(vector, Memory(vector))
    assert (found.faults, found.selected, found.references) == (wanted.faults, wanted.selected, wanted.references)
    assert (found.out is None) == (wanted.out is None)
    if wanted.out is not None:
        np.testing.assert_array_equal(found.out.view(np.uint16), wanted.out.view(np.uint16))
    counted = traffic(vector.settings, wanted.score_dims, wanted.chosen)
    assert (read.index_requests, read.requests) == (counted.index.requests, counted.all.requests)
    assert read.codewords == counted.all.codewords


def paged(index=IndexFormat.INT4, tokens=300, **options):
    settings = HeadSettings(Mode.PAGE | Mode.PROBABILITY, 64, 0.18, score_dims=8, top_k=4, local_window=1,
                            group_tokens=16, block_tokens=64, index_format=index, **options)  # fmt: skip
    return random_vector(settings, tokens, 2, seed=5)


@pytest.mark.parametrize(
    "index",
    [pytest.param(form, marks=[pytest.mark.full] * (form is not IndexFormat.INT4)) for form in IndexFormat],
)
def test_only_what_is_read_is_judged(index):
    vector = paged(index, 150)
    memory = Memory(vector)
    wanted = vector.result()
    codewords = memory.bytes.reshape(-1, SEALED_BYTES)
    groups = -(-len(vector.k) // 16) * 2 * 8
    touched = []
    for number in range(len(codewords)):
        before = codewords[number].copy()
        codewords[number, 100] ^= 1
        found, _ = run(vector, memory)
        codewords[number] = before
        assert found.faults in (Fault(0), Fault.MISDIRECTED)
        touched.append(bool(found.faults))
        assert found.faults or (found.out == wanted.out).all()
    counted = traffic(vector.settings, wanted.score_dims, wanted.chosen)
    assert sum(touched[groups:]) == counted.index.codewords
    assert counted.gather.codewords <= sum(touched[:groups]) <= counted.gather.codewords + counted.suffix.codewords


def test_what_cannot_be_corrected_is_told():
    vector = paged()
    memory = Memory(vector)
    chosen = np.flatnonzero(vector.result().chosen)[0] // 16
    memory.lost.add(PageEntry.unpack(int(memory.image.token_table[chosen])).address)
    found, read = run(vector, memory)
    assert found.faults == Fault.UNCORRECTABLE and found.out is None
    assert (read.uncorrectable, read.misdirected) == (8, 0)


def test_an_index_that_lies_otherwise_than_k_is_what_counts():
    vector = paged()
    other = replace(vector, k=vector.k[::-1].copy())
    mixed = Memory(vector)
    index = Memory(other).bytes[-mixed.image.index_table.size * 8 * SEALED_BYTES :]
    mixed.bytes[-len(index) :] = index
    found, _ = run(vector, mixed)
    assert not found.faults
    assert (found.chosen != vector.result().chosen).any()


def test_entries_without_a_place_and_blocks_on_two_channels():
    vector = paged()
    memory = Memory(vector)
    tokens, index = memory.image.token_table, memory.image.index_table
    bad = tokens.copy()
    bad[np.flatnonzero(vector.result().chosen)[0] // 16] = PageEntry(CHANNELS, address=0).pack()
    found, read = run(vector, memory, token_table=bad)
    assert found.faults == Fault.ENTRY and found.entries == 19
    assert read.token_requests == traffic(vector.settings, found.score_dims, np.zeros(300, bool)).suffix.requests
    scattered = index.copy()
    scattered[2] = PageEntry((PageEntry.unpack(int(index[2])).channel + 1) % CHANNELS, address=0).pack()
    found, _ = run(replace(vector, settings=replace(vector.settings, score_dims=64)), memory, index_table=scattered)
    assert found.faults == Fault.ENTRY and found.sums is None
