"""The cache as a transformers model sees it: keys, values and mask sizes are those of transformers' own."""

import threading
import time

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from nearflash.abi.errors import CommandError, StorageFullError, UnsupportedError
from nearflash.offload.cache.kv_cache import CacheMover, TieredCache, TieredLayer, find_cached_layers
from nearflash.offload.cache.kv_storage import KvForm, MemoryStorage
from nearflash.offload.tiers.ledger import Budgets, Ledger
from nearflash.offload.tiers.link import DeviceLink, host_memory

FORM = KvForm(2, 3, 60, 16, torch.float32)


def mover(ledger=None, overlap=True, buffers=3):
    return CacheMover(DeviceLink(), ledger or Ledger(), buffers, FORM.dense.size_bytes, overlap)


def layer(window=None, home=False, ledger=None):
    if home:
        return TieredLayer(0, FORM, window, host_memory(FORM.size_bytes), None)
    memory = host_memory(MemoryStorage.rest_bytes(FORM))
    return TieredLayer(0, FORM, window, None, MemoryStorage(FORM, memory, ledger or Ledger()))


def states(new, generator):
    shape = (FORM.batch, FORM.heads, new, FORM.dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("home", [True, False], ids=["home", "rest"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("window", [None, 2, 8, 64])
def test_it_gives_what_transformers_own_layer_gives(home, overlap, window):
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
    ours, moves, generator = layer(window, home), mover(overlap=overlap), torch.Generator().manual_seed(3)
    for new in (7, 1, 1, 3, 1, 12, 1, 1):
        assert ours.get_mask_sizes(new) == tuple(theirs.get_mask_sizes(new))
        assert ours.get_seq_length() == theirs.get_seq_length()
        moves.begin(ours)
        moves.ready(ours)
        key, value = states(new, generator)
        for own, other in zip(ours.update(key, value), theirs.update(key, value), strict=True):
            assert torch.equal(own, other)
        moves.finish(ours)
    moves.drain()
    moves.close()
    assert ours.is_sliding == (window is not None)
    assert ours.get_max_length() == theirs.get_max_length()


def test_it_has_to_be_its_turn():
    ours = layer()
    with pytest.raises(UnsupportedError, match="visited in its turn"):
        ours.update(*states(1, None))


def test_more_tokens_than_there_is_room_for():
    ours = layer(home=True)
    ours.update(*states(59, None))
    with pytest.raises(UnsupportedError, match="60 tokens"):
        ours.update(*states(2, None))


@pytest.mark.parametrize("change", [{"batch": 3}, {"heads": 4}, {"dim": 8}, {"dtype": torch.float16}])
def test_another_models_keys_are_refused(change):
    found = {"batch": 2, "heads": 3, "dim": 16, "dtype": torch.float32} | change
    other = torch.zeros(found["batch"], found["heads"], 1, found["dim"], dtype=found["dtype"])
    with pytest.raises(UnsupportedError, match=r"keys and values of layer 0 must be of 2 sequences, 3 KV heads of 16"):
        layer(home=True).update(other, other)


def test_several_layers_share_few_buffers():
    moves, generator = mover(buffers=3), torch.Generator().manual_seed(1)
    layers = [layer() for _ in range(10)]
    kept = [[] for _ in layers]
    for new in (5, 1, 1, 1):
        for place, own in enumerate(layers):
            for ahead in layers[place : place + 3]:
                moves.begin(ahead)
            moves.ready(own)
            kept[place].append(states(new, generator))
            keys, values = own.update(*kept[place][-1])
            assert torch.equal(keys, torch.cat([key for key, _ in kept[place]], dim=2))
            assert torch.equal(values, torch.cat([value for _, value in kept[place]], dim=2))
            moves.finish(own)
    moves.drain()
    assert [moves._free.acquire() for _ in range(3)]
    moves.close()


def test_a_load_waits_for_the_store_before_it():
    ours, moves = layer(), mover()
    slow = ours.storage.store_over

    def store(*args):
        time.sleep(0.1)
        slow(*args)

    ours.storage.store_over = store
    key, value = states(4, None)
    moves.ready(ours)
    ours.update(key, value)
    moves.finish(ours)
    moves.begin(ours)
    moves.ready(ours)
    assert torch.equal(ours.work[0, :, :, :4], key) and torch.equal(ours.work[1, :, :, :4], value)
    moves.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_full_disk_is_reported_at_the_next_visit_at_last(overlap):
    ours, moves = layer(), mover(overlap=overlap)

    def full(*args):
        raise StorageFullError("no room")

    ours.storage.store_over = full
    with pytest.raises(StorageFullError):
        moves.ready(ours)
        ours.update(*states(4, None))
        moves.finish(ours)
        moves.ready(ours)
    moves.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearflash-cache")]


def test_a_store_that_fails_ends_the_loads_that_wait_for_a_buffer():
    """What is submitted after it is not stored, and frees no buffer."""
    moves, layers, may_fail = mover(buffers=2), [layer() for _ in range(4)], threading.Event()

    def full(*args):
        assert may_fail.wait(10)
        raise StorageFullError("no room")

    layers[0].storage.store_over = full
    for own in layers[:2]:
        moves.ready(own)
        own.update(*states(4, None))
        moves.finish(own)
    for own in layers[2:]:
        moves.begin(own)
    waiting = [moves._loads.pop(own) for own in layers[2:]]
    may_fail.set()
    try:
        assert all(isinstance(each.exception(10), StorageFullError) for each in waiting)
        with pytest.raises(StorageFullError, match="no room"):
            moves.drain()
    finally:
        moves.close()


def test_closing_ends_a_load_that_waits_for_a_buffer():
    ledger = Ledger()
    moves = mover(ledger, buffers=1)
    first, second = layer(), layer()
    moves.ready(first)
    moves.begin(second)
    waiting = moves._loads.pop(second)
    moves.close()
    moves.close()
    assert ledger.held == {"gpu": 0}
    with pytest.raises(CommandError, match="the KV cache must be open, not closed"):
        waiting.result()


def test_buffers_are_counted():
    ledger = Ledger(Budgets(gpu=3 * FORM.dense.size_bytes - 1))
    with pytest.raises(ValueError, match="buffers of the KV cache"):
        mover(ledger)


def test_layers_by_kind(saved):
    _, llama = saved("llama")
    assert find_cached_layers(llama.config) == dict.fromkeys(range(4))
    _, gemma = saved("gemma2")
    windows = find_cached_layers(gemma.config)
    assert sorted(windows) == [0, 1, 2, 3] and set(windows.values()) == {16, None}


def test_layers_that_are_not_tiered_are_transformers_own(saved):
    _, llama = saved("llama")
    own = TieredLayer(2, FORM, None, host_memory(FORM.size_bytes), None)
    cache = TieredCache(llama.config, {2: own})
    assert cache.layers[2] is own and len(cache.layers) == 4
    assert all(isinstance(cache.layers[number], DynamicLayer) for number in (0, 1, 3))
