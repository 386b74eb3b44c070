"""The store: what is appended is found again; what it refuses, and how it fails."""

import errno
import os

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, FormatError, PageError, ShapeError, StorageFullError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.io.backend import PositionalBackend
from nearflash.storage.kv import KvLayout, KvShape


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("interleaved, queues", [(True, (1, 1)), (False, (1, 1)), (True, (2, 2)), (False, (2, 2))])
def test_what_is_appended_comes_back(make_store, draw, stored, interleaved, queues, background):
    k, v = draw(1, 333)
    with make_store(
        interleaved=interleaved, channels=queues[0], luns=queues[1], background=background, buffer_bytes=1 << 16
    ) as store:
        store.add()
        sequence = store.add()
        for start, end in [(0, 200), (200, 201), (201, 250), *((t, t + 1) for t in range(250, 333))]:
            store.append(sequence, 1, k[:, start:end], v[:, start:end])
        found = stored(store, sequence, 1)
        assert np.array_equal(found[0], k) and np.array_equal(found[1], v)
        assert np.array_equal(store.layer(sequence, 1).v_mean, v.mean(axis=1, dtype=np.float64).astype(np.float32))
        head = store.head(sequence, 1, 2)
        assert head.page_tag == PageTag(sequence, 1, 2) and head.tokens == 333
        assert head.token_pages.shape == (20,) and head.index_pages.shape == (5 * 4,)
        assert head.flash_tokens == 320  # of a block, too
        assert np.array_equal(head.suffix_k, k[2, 320:]) and np.array_equal(head.suffix_v, v[2, 320:])
        assert np.array_equal(head.v_mean, store.layer(sequence, 1).v_mean[2])
        assert store.lengths == {0: 0, sequence: 0}
        store.append(sequence, 0, k[:, :7], v[:, :7])
        assert store.lengths == {0: 0, sequence: 7}
        store.free(0)
        assert store.lengths == {sequence: 7} and store.add() == 2


def test_a_heads_groups_go_round_channels_and_units(make_store, draw):
    with make_store(channels=2, luns=2, interleaved=False) as store:
        sequence, geometry = store.add(), store.flash.geometry
        store.append(sequence, 0, *draw(1, 128))
        at = store.layer(sequence, 0)
        queues = at.token_pages // geometry.pages_per_block % geometry.lun_queues
        assert (np.sort(queues.reshape(3, 2, 4)) == np.arange(4)).all()
        blocks = at.index_pages.reshape(3, 2, -1) // geometry.pages_per_block
        channels, luns = blocks % 2, blocks // 2 % 2
        assert (channels == channels[..., :1]).all()
        assert (channels[:, 0] != channels[:, 1]).all() and (luns[..., 0] != luns[..., 1]).all()


def test_tails_stay_in_memory_while_there_is_room(make_store, draw):
    """Of two sequences at a time; blocks are indexed without reading a page back, those of the third from flash."""
    k, v = draw(1, 140)
    with make_store(suffix_bytes=100_000, memory=True, buffer_bytes=8192) as store:
        kept, also, third = (store.add() for _ in range(3))
        assert store.suffix_bytes == (2 * 64 + 16) * store.shape.token_bytes
        for number in (kept, also, third):
            for start, end in [(0, 40), (40, 60), (60, 70), (70, 128), (128, 140)]:
                store.append(number, 1, k[:, start:end], v[:, start:end])
            reads = store.statistics.read_pages
            assert (reads > 0) == (number == third)
            at = store.layer(number, 1)
            assert at.flash_tokens == 128 and np.array_equal(at.suffix_v, v[:, 128:])
        store.append(kept, 1, k[:, :20], v[:, :20])
        store.append(third, 1, k[:, :20], v[:, :20])
        assert store.layer(kept, 1).suffix_k.shape[1] == 32 and store.layer(third, 1).suffix_k.shape[1] == 0
        store.free(kept)
        assert store.layer(store.add(), 0).tokens == 0
        assert store.suffix_bytes == (2 * 64 + 16) * store.shape.token_bytes


def test_staged_pages_are_read_from_memory_and_programmed_for_devices(make_store, draw, stored):
    with make_store(memory=True, interleaved=False) as store:
        sequence, (k, v) = store.add(), draw(2, 64)
        store.append(sequence, 0, k, v)
        assert store.flash.programmed == 0 and np.array_equal(stored(store, sequence, 0)[0], k)
        assert store.statistics.read_pages == 0
        at = store.head(sequence, 0, 1)
        table = store.table(at.token_pages)
        assert store.flash.programmed == 3 * (4 * 2 + 4) == store.statistics.live_pages
        assert np.array_equal(table, store.flash.entries(at.token_pages))
        assert np.array_equal(stored(store, sequence, 0)[1], v)
        assert store.statistics.read_pages == 3 * 4 * 2


def test_old_page_numbers_are_refused_while_their_pages_are_staged(make_store, draw):
    with make_store(memory=True, blocks=6) as store:
        sequence = store.add()
        store.append(sequence, 0, *draw(2, 16))
        keys = store.pages.token_keys(sequence, 1, range(1)).reshape(-1)
        with pytest.raises(PageError, match="before the next append"):
            store.read(store.layer(sequence, 0).token_pages.reshape(-1), keys)


@pytest.mark.parametrize("kind", ["token", "index"])
def test_a_flipped_bit_is_named_by_its_tokens(make_store, draw, tmp_path, kind):
    with make_store() as store:
        sequence = store.add()
        store.append(sequence, 1, *draw(3, 150))
        store.flush()
        at, keys = store.layer(sequence, 1), store.pages.token_keys(sequence, 1, range(9))
        pages, what = at.token_pages, r"head 2, token page 5 is damaged.*tokens \[80, 96\)"
        if kind == "index":
            keys, pages = store.pages.index_keys(sequence, 1, range(2)), at.index_pages
            what = r"head 2, index page 5 is damaged.*tokens \[64, 128\)"
        with (tmp_path / "kv").open("r+b") as file:
            file.seek(store.flash.offset(int(pages[2, 5])))
            file.write(b"\xff\x00\xff")
        with pytest.raises(PageError, match=rf"sequence {sequence}, layer 1, {what}"):
            store.read(pages.reshape(-1), keys.reshape(-1))


def test_a_damaged_page_stops_what_needs_it_until_its_sequence_is_freed(make_store, draw, stored, tmp_path):
    with make_store(blocks=4, pages_per_block=16, interleaved=True, suffix_bytes=0) as store:
        damaged, other = store.add(), store.add()
        store.append(damaged, 0, *draw(1, 40))
        store.append(other, 0, *draw(2, 40))
        store.flush()
        with (tmp_path / "kv").open("r+b") as file:
            file.seek(store.flash.offset(int(store.layer(damaged, 0).token_pages[1, 0])))
            file.write(b"\xff\x00\xff")
        with pytest.raises(PageError, match=rf"sequence {damaged}, layer 0, head 1.*tokens \[0, 16\)"):
            store.append(damaged, 0, *draw(3, 24))  # completes an index block
        assert store.layer(damaged, 0).tokens == 40
        store.append(other, 0, *draw(4, 24))
        store.free(damaged)
        assert stored(store, other, 0)[0].shape[1] == 64


def test_no_room_changes_nothing(make_store, draw, stored):
    with make_store(memory=True, blocks=4, pages_per_block=16) as store:
        sequence, (k, v) = store.add(), draw(5, 90)
        store.append(sequence, 0, k, v)
        before, at = store.statistics, store.layer(sequence, 0)
        with pytest.raises(StorageFullError, match=r"no room for \d+ pages: lun 0 of channel 0 has 3 blocks of 16"):
            store.append(sequence, 0, *draw(6, 200))
        after = store.statistics
        assert after.host_bytes == before.host_bytes and after.programmed == before.programmed
        assert store.layer(sequence, 0).tokens == 90
        assert np.array_equal(store.layer(sequence, 0).token_pages, at.token_pages)
        assert np.array_equal(stored(store, sequence, 0)[0], k)
        store.free(sequence)
        store.append(store.add(), 0, *draw(6, 90))


class Full(PositionalBackend):
    """A disk that has room for so many writes."""

    left = 1_000_000

    def write(self, fd, memory, offset):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, memory, offset)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_is_named_and_the_rest_stays_readable(make_store, draw, stored, tmp_path, background):
    backend = Full()
    store = make_store(backend=backend, background=background, buffer_bytes=1 << 15)
    sequence, (k, v) = store.add(), draw(5, 64)
    store.append(sequence, 0, k, v)
    store.flush()
    backend.left = 3
    with pytest.raises(StorageFullError, match=r"no room while writing \d+ bytes of .*/kv at offset \d+"):
        for _ in range(50):
            store.append(sequence, 1, k, v)
    for again in (lambda: store.append(sequence, 0, k, v), store.flush):
        with pytest.raises(StorageFullError, match="no room while writing"):
            again()
    assert np.array_equal(stored(store, sequence, 0)[0], k)
    store.close()
    store.close()
    FileFlash.open(tmp_path / "kv").close()


def test_an_error_that_nobody_heard_of_is_raised_when_the_store_is_closed(make_store, draw):
    backend = Full()
    store = make_store(backend=backend, background=True)
    backend.left = 0
    store.append(store.add(), 0, *draw(5, 64))
    with pytest.raises(StorageFullError, match="no room while writing"):
        store.close()
    store.close()


def test_bad_arguments(make_store, draw):
    with make_store() as store:
        sequence, (k, v) = store.add(), draw(1, 5)
        for error, match, arguments in [
            (CommandError, "sequence must be one that was added and not freed, not 3", (3, 0, k, v)),
            (CommandError, "layer must be 0 to 1, not 2", (sequence, 2, k, v)),
            (ShapeError, r"k must be \(3, t, 32\), not \(2, 5, 32\)", (sequence, 0, k[:2], v)),
            (ShapeError, r"v must have the shape of k, \(3, 5, 32\), not \(3, 4, 32\)", (sequence, 0, k, v[:, :4])),
            (FormatError, "v must be float16, not float32", (sequence, 0, k, v.astype(np.float32))),
        ]:
            with pytest.raises(error, match=match):
                store.append(*arguments)
        with pytest.raises(CommandError, match="head must be 0 to 2, not 3"):
            store.head(sequence, 0, 3)
        assert store.lengths == {sequence: 0}


def test_what_does_not_fit_together_is_refused(make_store):
    with pytest.raises(CommandError, match="background must be False on NandFlash, whose calls come from one thread"):
        make_store(nand=True, blocks=3, background=True)
    for error, match, keywords in [
        (StorageFullError, "blocks must be at least 3 on each lun of each channel, not 4", {"blocks": 4, "luns": 2}),
        (CommandError, "pages_per_block must be even", {"interleaved": False, "pages_per_block": 15}),
        (CommandError, "block_tokens must be a multiple of 16, not 72", {"block_tokens": 72}),
        (CommandError, "group tokens must be", {"group_tokens": 36, "block_tokens": 144}),
        (CommandError, "block_tokens must be a multiple of 16, 16 to 1024, not 2048", {"block_tokens": 2048}),
        (CommandError, "buffer_bytes must hold at least two pages", {"buffer_bytes": 4096}),
    ]:
        with pytest.raises(error, match=match):
            make_store(**keywords)
    with pytest.raises(CommandError, match="dim must be a multiple of 4"):
        KvShape(1, 1, 30)
    with pytest.raises(CommandError, match="layers must be 1 to 65536, not 0"):
        KvShape(0, 1, 32)
    assert KvLayout(16, True, 64, 2, 4096).index_format is IndexFormat.INT4
