"""The last tokens of kept sequences, which fill no KV page group: there again after a flush, never those of before."""

import json
import zlib

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import StateError, StorageFullError
from nearflash.cli.main import main
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, open_kept_store
from nearflash.storage.kv.journal import SequenceJournal, journal_path
from nearflash.storage.kv.statistics import Cause

SHAPE = KvShape(layers=2, kv_heads=3, dim=32)


@pytest.fixture(params=[True, False], ids=["interleaved", "separate"])
def reopen(request, tmp_path):
    """Opens the one store of the test, again and again; of so many blocks the first time."""
    layout = KvLayout(16, request.param, 64, IndexFormat.INT4, 4096)

    def open_(blocks=64, **options):
        return open_kept_store(tmp_path / "kv", SHAPE, layout, FlashGeometry(4096, 16, 1, 1, blocks), **options)

    open_.path = tmp_path / "kv"
    return open_


def grow(store, sequence, kv, start, end):
    for layer in range(store.shape.layers):
        store.append(sequence, layer, *(x[:, start:end] for x in kv))


def die(store):
    """End a store as a kill does: nothing more is programmed or noted."""
    store._pool.stage.flush()  # pages are programmed by a thread at once
    store.flash.close()
    store._journal._out.close()
    store._open = False


def check(stored, store, number, *kv):
    """kv: (k, v) of parts of the sequence, one after the other."""
    want = [np.concatenate(parts, axis=1) for parts in zip(*kv, strict=True)]
    assert store.lengths[number] == want[0].shape[1]
    for layer in range(SHAPE.layers):
        for got, own in zip(stored(store, number, layer), want, strict=True):
            assert np.array_equal(got, own)


def part(kv, start, end):
    return tuple(x[:, start:end] for x in kv)


def test_every_flush_covers_all_tokens(reopen, draw, stored):
    kv, tokens = draw(1, 120), 0
    for end in (5, 16, 20, 21, 47, 100, 120):
        with reopen() as store:
            number = next(iter(store.lengths)) if tokens else store.add()
            grow(store, number, kv, tokens, end)
            store.flush()
            die(store)
        tokens = end
        with reopen() as store:
            check(stored, store, number, part(kv, 0, end))
            die(store)


def test_what_a_flush_has_written_is_not_written_again(reopen, draw):
    with reopen() as store:
        number = store.add()
        grow(store, number, draw(1, 40), 0, 40)
        store.flush()
        before = store.statistics.programmed[Cause.PARTIAL]
        assert before == SHAPE.layers * SHAPE.kv_heads * store.layout.group_pages
        for _ in range(3):
            store.flush()
        live = store.statistics.live_pages
        grow(store, number, draw(2, 1), 0, 1)
        store.flush()
        assert store.statistics.programmed[Cause.PARTIAL] == 2 * before
        assert store.statistics.live_pages == live  # the last one's place is given back


@pytest.mark.parametrize("crop", [36, 32, 20])
@pytest.mark.parametrize("end", [44, 60])
def test_what_was_cropped_does_not_come_back(reopen, draw, stored, crop, end):
    """Tokens of before the crop would be served for those that came after it."""
    kv, other = draw(1, 60), draw(2, 60)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 40)
        store.flush()
        store.crop(number, crop)
        grow(store, number, other, crop, end)
        die(store)
    with reopen() as store:
        tokens = store.lengths[number]
        assert tokens == end // 16 * 16 if end // 16 > crop // 16 else tokens == crop // 16 * 16
        check(stored, store, number, part(kv, 0, min(crop, tokens)), part(other, crop, max(tokens, crop)))


def test_a_crop_behind_them_keeps_them(reopen, draw, stored):
    kv = draw(1, 60)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 40)
        store.flush()
        grow(store, number, kv, 40, 60)
        store.crop(number, 45)
        die(store)
    with reopen() as store:
        check(stored, store, number, part(kv, 0, 40))


def test_those_behind_a_damaged_group_are_forgotten(reopen, draw, stored):
    """They come after other tokens, once the sequence has grown again."""
    kv, other = draw(1, 90), draw(2, 90)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 70)
        store.flush()
        offset = store.flash.offset(int(store.layer(number, 1).token_pages[2, 1]))
        die(store)
    with reopen.path.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\xa5" * 8)
    with reopen() as store:
        check(stored, store, number, part(kv, 0, 16))
        grow(store, number, other, 16, 64)
        die(store)
    with reopen() as store:
        check(stored, store, number, part(kv, 0, 16), part(other, 16, 64))


def test_they_are_moved_with_their_blocks(reopen, draw, stored):
    kv = draw(1, 40)
    with reopen(read_limit=3) as store:
        number = store.add()
        grow(store, number, kv, 0, 40)
        store.flush()
        store.count_reads(np.arange(64).repeat(4))
        store.flush()
        assert store.statistics.programmed[Cause.DISTURB] >= store.statistics.live_pages > 0
        die(store)
    for _ in range(2):
        with reopen() as store:
            check(stored, store, number, kv)
    with reopen() as store:
        store.free(number)
        assert store.statistics.live_pages == 0


def test_without_room_for_them_all_else_is_kept(reopen, draw, stored):
    kv = draw(1, 16)
    with pytest.raises(StorageFullError, match="no room"), reopen(blocks=6) as store:
        first = store.add()
        grow(store, first, kv, 0, 16)
        grow(store, first, kv, 0, 3)
        store.flush()
        full = []
        with pytest.raises(StorageFullError):
            while True:
                full.append(store.add())
                grow(store, full[-1], kv, 0, 16)
        store.free(full.pop())
        last = store.add()
        grow(store, last, kv, 0, 9)
        with pytest.raises(StorageFullError):
            store.flush()
        check(stored, store, last, part(kv, 0, 9))
    with reopen() as store:
        check(stored, store, first, kv, part(kv, 0, 3))
        assert store.lengths[last] == 0 and full
        for number in full:
            check(stored, store, number, kv)


def test_a_journal_that_cannot_be_written_leaves_those_of_before(reopen, draw, stored, monkeypatch):
    kv = draw(1, 40)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 36)
        store.flush()
        live = store.statistics.live_pages
        grow(store, number, kv, 36, 40)

        def fail(*_):
            raise StateError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(SequenceJournal, "keep_partial_group", fail)
            with pytest.raises(StateError, match="no room"):
                store.flush()
        assert store.statistics.live_pages == live
        check(stored, store, number, kv)
        die(store)
    with reopen() as store:
        check(stored, store, number, part(kv, 0, 36))


@pytest.mark.parametrize("version", [1, 2])
def test_a_journal_of_an_earlier_version_is_read(reopen, draw, stored, version):
    """Version 1 has no partial groups, 2 no names of before; checksums of both are of the text alone."""
    kv = draw(1, 32)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 32)
    path = journal_path(reopen.path)
    first, *others = [json.loads(line[9:]) for line in path.read_bytes().splitlines()]
    assert first.pop("version") == 3 and first.pop("previous") == ""
    texts = [json.dumps(body).encode() for body in ({"version": version, **first}, *others)]
    path.write_bytes(b"".join(b"%08x %b\n" % (zlib.crc32(text), text) for text in texts))
    with reopen() as store:
        check(stored, store, number, kv)


def test_verify_and_status_list_sequences_with_them(reopen, draw, capsys):
    kv = draw(1, 90)
    with reopen() as store:
        number = store.add()
        grow(store, number, kv, 0, 70)
        child = store.fork(number)
        grow(store, child, kv, 0, 20)
        store.flush()
        page = int(store.layer(number, 0).token_pages[0, 3])
        offset = store.flash.offset(page)
        die(store)
    for action in ("verify", "status"):
        assert main(["kv", action, str(reopen.path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(",")[0] for line in lines if line.startswith("sequence")] == [
            f"sequence {number}: 70 tokens",
            f"sequence {child}: 90 tokens",
        ]
    with reopen.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 9)
    assert main(["kv", "verify", str(reopen.path)]) == 1
    out = capsys.readouterr().out
    assert f"sequence {number}: 48 tokens" in out and f"sequence {child}: 48 tokens" in out


@pytest.mark.parametrize("seed", range(3))
def test_random_lives(reopen, stored, seed):
    """After every kill each sequence has what the last flush covered, or a beginning of what it has held since."""
    rng = np.random.default_rng(seed)
    held, flushed, alive = {}, {}, None  # K and V of each sequence, and how many tokens of them are certain
    for _ in range(60):
        store = alive or reopen(read_limit=30)
        alive = store
        for number in set(held) - set(store.lengths):
            assert number not in flushed
            del held[number]
        for number, tokens in store.lengths.items():
            if tokens < held[number].shape[2]:
                assert tokens >= flushed.get(number, 0)
                held[number] = held[number][:, :, :tokens]
            check(stored, store, number, held[number])
        action = rng.choice(["add", "grow", "grow", "grow", "crop", "fork", "free", "flush", "die", "close"])
        if action == "add" or not held:
            held[store.add()] = np.zeros((2, SHAPE.kv_heads, 0, SHAPE.dim), np.float16)
            continue
        number = int(rng.choice(list(held)))
        if action == "grow":
            new = rng.standard_normal((2, SHAPE.kv_heads, int(rng.integers(1, 40)), SHAPE.dim)).astype(np.float16)
            grow(store, number, new, 0, new.shape[2])
            held[number] = np.concatenate([held[number], new], axis=2)
        elif action == "crop":
            length = int(rng.integers(held[number].shape[2] + 1))
            store.crop(number, length)
            held[number] = held[number][:, :, :length]
            if flushed.get(number, 0) > length:
                flushed[number] = length // 16 * 16  # what is cut in a group is in memory again
        elif action == "fork":
            held[store.fork(number)] = held[number]
        elif action == "free":
            store.free(number)
            held.pop(number)
            flushed.pop(number, None)
        else:
            if action != "die":
                store.flush()
                flushed = {one: kv.shape[2] for one, kv in held.items()}
            if action == "close":
                store.close()
            if action == "die":
                die(store)
            alive = None if action in ("close", "die") else store
    if alive:
        alive.close()
