"""Forks and crops: what is shared, what is given back, what comes back to memory, and what is an error."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError, PageError, StorageFullError


def grow(store, sequence, kv, start, end):
    for layer in range(store.shape.layers):
        store.append(sequence, layer, *(x[:, start:end] for x in kv))


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_fork_shares_pages_until_both_are_freed(make_store, draw, stored, interleaved):
    with make_store(interleaved=interleaved) as store:
        kv, more = draw(1, 200), draw(2, 60)
        parent = store.add()
        grow(store, parent, kv, 0, 150)
        before = store.statistics
        child = store.fork(parent)
        after = store.statistics
        assert after.live_pages == before.live_pages and after.programmed == before.programmed
        grow(store, parent, kv, 150, 200)
        grow(store, child, more, 0, 60)
        pairs = list(zip(kv, more, strict=True))
        for layer in range(2):
            for number, want in ((parent, kv), (child, [np.concatenate([x[:, :150], y], 1) for x, y in pairs])):
                found = stored(store, number, layer)
                assert np.array_equal(found[0], want[0]) and np.array_equal(found[1], want[1])
        store.free(parent)
        assert np.array_equal(stored(store, child, 1)[0], np.concatenate([kv[0][:, :150], more[0]], 1))
        store.free(child)
        assert store.statistics.live_pages == 0


def test_pages_go_by_another_number_after_a_fork_or_a_crop_on_a_file_alone(make_store, draw):
    for memory in (False, True):
        with make_store(memory=memory) as store:
            kv = draw(1, 100)
            parent = store.add()
            grow(store, parent, kv, 0, 70)
            child = store.fork(parent)
            grow(store, child, kv, 70, 100)
            own = parent if memory else child
            assert store.layer(child, 0).token_tags.tolist() == [parent] * 4 + [own] * 2
            assert (
                store.layer(child, 0).index_tags.tolist() == [parent] and store.layer(child, 0).page_tag.sequence == own
            )
            store.crop(child, 35)
            grow(store, child, kv, 35, 100)
            tags = store.layer(child, 0)
            assert len(set(tags.token_tags.tolist())) == (1 if memory else 2)
            assert (tags.token_tags[:2] == parent).all() and (tags.token_tags[2:] == tags.page_tag.sequence).all()
            assert set(tags.index_tags.tolist()) == {tags.page_tag.sequence}


@pytest.mark.parametrize("suffix_bytes", [0, 1 << 20])
@pytest.mark.parametrize("length", [200, 199, 193, 192, 130, 128, 65, 16, 15, 0])
def test_a_crop_gives_whole_groups_back_and_reopens_the_one_that_is_cut(make_store, draw, stored, suffix_bytes, length):
    with make_store(suffix_bytes=suffix_bytes) as store:
        kv, more = draw(1, 200), draw(2, 90)
        number = store.add()
        grow(store, number, kv, 0, 200)
        store.crop(number, length)
        assert store.lengths[number] == length
        groups, blocks = length // 16, length // 64
        assert store.statistics.live_pages == 2 * 3 * (groups + blocks * store.pages.index_layout.pages)
        at = store.layer(number, 1)
        assert np.array_equal(at.suffix_v, kv[1][:, at.flash_tokens : length])
        assert np.array_equal(
            at.v_mean, (kv[1][:, :length].sum(1, dtype=np.float64) / max(length, 1)).astype(np.float32)
        )
        grow(store, number, more, 0, 90)
        want = [np.concatenate([x[:, :length], y], 1) for x, y in zip(kv, more, strict=True)]
        found = stored(store, number, 0)
        assert np.array_equal(found[0], want[0]) and np.array_equal(found[1], want[1])


def test_layers_of_unequal_length_are_cropped_to_what_all_have(make_store, draw, stored):
    """After a call that failed in the middle: no fork, but a crop."""
    with make_store() as store:
        kv = draw(1, 100)
        number = store.add()
        grow(store, number, kv, 0, 50)
        store.append(number, 0, *(x[:, 50:100] for x in kv))
        with pytest.raises(CommandError, match="sequence 0 must have as many tokens in every layer to be forked"):
            store.fork(number)
        for length in (-1, 51):
            with pytest.raises(CommandError, match=f"length must be 0 to 50, the tokens of sequence 0, not {length}"):
                store.crop(number, length)
        assert store.layer(number, 0).tokens == 100
        store.crop(number, 50)
        assert [np.array_equal(stored(store, number, layer)[0], kv[0][:, :50]) for layer in (0, 1)] == [True, True]
        store.fork(number)


def test_what_is_not_there_is_an_error(make_store):
    with make_store() as store:
        for call in (lambda: store.fork(7), lambda: store.crop(7, 0), lambda: store.free(7)):
            with pytest.raises(CommandError, match="sequence must be one that was added and not freed, not 7"):
                call()


def test_a_fork_without_memory_for_its_suffix_keeps_the_last_group_alone(make_store, draw, stored):
    with make_store(suffix_bytes=64 * 4 * 2 * 3 * 32) as store:
        kv = draw(1, 60)
        parent = store.add()
        grow(store, parent, kv, 0, 60)
        child = store.fork(parent)
        assert store.layer(parent, 0).flash_tokens == 0 and store.layer(child, 0).flash_tokens == 48
        assert np.array_equal(stored(store, child, 1)[1], kv[1])


def test_a_crop_that_cannot_read_changes_nothing(make_store, draw, tmp_path):
    with make_store(path=tmp_path / "kv", suffix_bytes=0) as store:
        kv = draw(1, 100)
        number = store.add()
        grow(store, number, kv, 0, 100)
        store.flush()
        page = int(store.layer(number, 1).token_pages[2, 3])
        with (tmp_path / "kv").open("r+b") as file:
            file.seek(store.flash.offset(page) + 9)
            file.write(b"\xff\xfe\xfd")
        with pytest.raises(PageError, match=r"tokens \[48, 64\)"):
            store.crop(number, 60)
        assert store.lengths[number] == 100 and store.layer(number, 0).token_pages.shape == (3, 6)
        store.crop(number, 97)


def test_a_full_store_is_usable_after_a_crop(make_store, draw, stored):
    with make_store(blocks=6, pages_per_block=16, memory=True) as store:
        kv = draw(1, 2000)
        number, end = store.add(), 0
        with pytest.raises(StorageFullError):
            for end in range(0, 2000, 20):
                grow(store, number, kv, end, end + 20)
        store.crop(number, end)
        assert np.array_equal(stored(store, number, 1)[0], kv[0][:, :end])
        store.crop(number, end // 2)
        grow(store, number, kv, end // 2, end)
        assert np.array_equal(stored(store, number, 0)[1], kv[1][:, :end])
