"""Heads read from their pages: the same results as from arrays, and faults of what was read, of nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import SEALED_BYTES, PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.model.attention.control.pages import PageSource
from nearflash.model.attention.draw import MODES, random_case, random_head
from nearflash.model.attention.head import attend_from
from nearflash.model.attention.image import head_image, image_bytes
from nearflash.model.attention.placement import MemoryStore
from nearflash.model.attention.settings import Settings
from nearflash.model.attention.traffic import traffic

CHANNELS = 3


class Memory:
    """Pages of one head, by address."""

    def __init__(self, case):
        store = MemoryStore(0, CHANNELS)
        self.image = head_image(case.k, case.v, case.settings, case.page_tag, store)
        self.bytes = np.zeros(image_bytes(case.settings, len(case.k)), np.uint8)
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


def run(case, memory, **tables):
    image = memory.image
    found = {"index_table": image.index_table, "token_table": image.token_table} | tables
    source = PageSource(case.settings, case.page_tag, len(case.k), **found, reader=memory)
    return attend_from(source, case.q, case.v_mean, case.settings), source.read


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_pages_change_nothing(mode, seed):
    rng = np.random.default_rng([seed, *mode.encode()])
    case = random_head(rng, mode, int(rng.choice([20, 64, 128])), int(rng.integers(1, 5)), int(rng.integers(1, 400)),
                       PageTag(seed, 3, 1))  # fmt: skip
    wanted = case.result()
    found, read = run(case, Memory(case))
    assert (found.faults, found.selected, found.references) == (wanted.faults, wanted.selected, wanted.references)
    assert (found.out is None) == (wanted.out is None)
    if wanted.out is not None:
        np.testing.assert_array_equal(found.out.view(np.uint16), wanted.out.view(np.uint16))
    counted = traffic(case.settings, wanted.score_dims, wanted.chosen)
    assert (read.index_requests, read.requests) == (counted.index.requests, counted.all.requests)
    assert read.codewords == counted.all.codewords


def paged(index=IndexFormat.INT4, **options):
    settings = Settings(Mode.PAGE | Mode.PROBABILITY, 64, 0.18, score_dims=8, top_k=4, local_window=1, group_tokens=16,
                        block_tokens=64, index_format=index, **options)  # fmt: skip
    return random_case(settings, 300, 2, seed=5)


@pytest.mark.parametrize("index", IndexFormat)
def test_only_what_is_read_is_judged(index):
    case = paged(index)
    memory = Memory(case)
    wanted = case.result()
    codewords = memory.bytes.reshape(-1, SEALED_BYTES)
    groups = -(-len(case.k) // 16) * 2 * 8
    touched = []
    for number in range(len(codewords)):
        before = codewords[number].copy()
        codewords[number, 100] ^= 1
        found, _ = run(case, memory)
        codewords[number] = before
        assert found.faults in (Fault(0), Fault.MISDIRECTED)
        touched.append(bool(found.faults))
        assert found.faults or (found.out == wanted.out).all()
    counted = traffic(case.settings, wanted.score_dims, wanted.chosen)
    assert sum(touched[groups:]) == counted.index.codewords
    assert counted.gather.codewords <= sum(touched[:groups]) <= counted.gather.codewords + counted.tail.codewords


def test_what_cannot_be_corrected_is_told():
    case = paged()
    memory = Memory(case)
    chosen = np.flatnonzero(case.result().chosen)[0] // 16
    memory.lost.add(PageEntry.unpack(int(memory.image.token_table[chosen])).address)
    found, read = run(case, memory)
    assert found.faults == Fault.UNCORRECTABLE and found.out is None
    assert (read.uncorrectable, read.misdirected) == (8, 0)


def test_an_index_that_lies_otherwise_than_k_is_what_counts():
    case = paged()
    other = replace(case, k=case.k[::-1].copy())
    mixed = Memory(case)
    index = Memory(other).bytes[-mixed.image.index_table.size * 8 * SEALED_BYTES :]
    mixed.bytes[-len(index) :] = index
    found, _ = run(case, mixed)
    assert not found.faults
    assert (found.chosen != case.result().chosen).any()


def test_entries_without_a_place_and_blocks_on_two_channels():
    case = paged()
    memory = Memory(case)
    tokens, index = memory.image.token_table, memory.image.index_table
    bad = tokens.copy()
    bad[np.flatnonzero(case.result().chosen)[0] // 16] = PageEntry(CHANNELS, address=0).pack()
    found, read = run(case, memory, token_table=bad)
    assert found.faults == Fault.ENTRY and found.entries == 19
    assert read.token_requests == traffic(case.settings, found.score_dims, np.zeros(300, bool)).tail.requests
    scattered = index.copy()
    scattered[2] = PageEntry((PageEntry.unpack(int(index[2])).channel + 1) % CHANNELS, address=0).pack()
    found, _ = run(replace(case, settings=replace(case.settings, score_dims=64)), memory, index_table=scattered)
    assert found.faults == Fault.ENTRY and found.sums is None
