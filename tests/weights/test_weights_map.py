"""Tensors of a map: in any order, held or dropped, damaged or kept, and the memory that they share."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from nearflash.abi.errors import WeightsError
from nearflash.storage.io.direct import aligned_buffer
from nearflash.verify.fixtures.files import rot
from nearflash.weights import compress_tensor, read_file, write_file
from nearflash.weights.compress import dense_tensor
from nearflash.weights.file import WeightsTensor
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor, WeightsMap, _Buffers, buffer_bytes

RNG = np.random.default_rng(3)
NAMES = ["a", "b", "c", "d", "e"]
EVERYTHING = 1 << 30
DTYPES = [(name, dtype, as_kept) for name, dtype in TORCH_DTYPES.items() for as_kept in (False, True)]


def values_of(rows):
    values = RNG.normal(size=(rows, 512)).astype(np.float16)
    return values * (RNG.random(values.shape) < 0.5)


VALUES = {name: values_of(rows) for name, rows in zip(NAMES, (64, 80, 64, 96, 112), strict=True)}


def written(path, packed):
    write_file(path, {each.name: (each.dtype, each.shape) for each in packed}, packed)
    return read_file(path)


@pytest.fixture
def tensors(tmp_path):
    """Bitmap matrices, one of int8 codes (its values are VALUES no longer), and `e`, dense."""
    packed = [compress_tensor(name, VALUES[name]) for name in NAMES[:4]]
    return written(
        tmp_path / "file", [*packed, dense_tensor("e", "F16", (112, 512), VALUES["e"].view(np.uint8).ravel())]
    )


def is_right(found, name):
    return found.dtype == torch.float16 and (found.numpy() == VALUES[name]).all()


@pytest.fixture
def reads(monkeypatch):
    """Names of tensors in the order in which they are read from the file."""
    names, load = [], WeightsTensor.load
    monkeypatch.setattr(WeightsTensor, "load", lambda each, memory: names.append(each.name) or load(each, memory))
    return names


def damage(tensor):
    at = tensor.offset + tensor.stored_bytes // 2
    rot(tensor.path, bytes([tensor.path.read_bytes()[at] ^ 16]), at)


def free_bytes(buffers):
    return sum(room * len(free) for room, free in buffers._free.items())


def test_memory_is_used_again_when_the_last_view_of_it_is_dropped():
    buffers = _Buffers(1 << 20)
    array = buffers.take(5000)
    address, view = array.ctypes.data, torch.from_numpy(array)[100:200].view(torch.int32)
    del array
    assert buffers.take(5000).ctypes.data != address
    del view
    assert address in {each.ctypes.data for each in [buffers.take(5000), buffers.take(5000)]}


@pytest.mark.parametrize(("sizes", "room"), [
    ((1, 4095, 4096), 4096), ((4097, 8192), 8192), ((65537, 70001, 73728), 73728), ((983041, 1 << 20), 1 << 20),
])  # fmt: skip
def test_odd_sizes_share_memory_and_waste_an_eighth_at_most(sizes, room):
    buffers, addresses = _Buffers(1 << 21), set()
    for size_bytes in sizes:
        array = buffers.take(size_bytes)
        assert len(array) == room and array.ctypes.data % 4096 == 0 and array.flags.writeable
        assert room - size_bytes <= max(size_bytes // 8, 4095)
        addresses.add(array.ctypes.data)
        del array
    assert len(addresses) == 1


def test_no_more_than_the_limit_waits_to_be_used():
    """Memory that had been held beyond the limit was all kept when it was dropped, as long as its sizes came again."""
    buffers = _Buffers(40 << 10)
    held = [buffers.take(8 << 10) for _ in range(20)]
    held += [buffers.take(20 << 10)]
    assert buffers._size_bytes == 180 << 10  # what is held is not limited
    held.clear()
    for _ in range(3):
        assert len(buffers.take(8 << 10)) == 8 << 10
        assert free_bytes(buffers) == buffers._size_bytes <= 40 << 10


def test_an_allocation_that_fails_is_not_counted(monkeypatch):
    def fails(size_bytes):
        raise MemoryError

    buffers = _Buffers(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("nearflash.weights.weights_map.aligned_buffer", fails)
        with pytest.raises(MemoryError):
            buffers.take(8192)
    assert buffers._size_bytes == 0 and len(buffers.take(8192)) == buffers._size_bytes == 8192


def test_buffers_have_room_for_what_is_read_at_once_and_twice_what_comes_next(tensors):
    stored, dense = max(each.stored_bytes for each in tensors.values()), VALUES["e"].nbytes
    assert buffer_bytes(iter(tensors.values()), 1000) == 2000 + dense + 6 * (stored + stored // 8)
    assert buffer_bytes([], 0) == 0


@pytest.mark.parametrize("prefetch_bytes", [0, 150_000, EVERYTHING])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_held_tensors_are_never_overwritten_and_dropped_ones_leave_no_more_than_the_limit(
    tensors, prefetch_bytes, seed
):
    random, held = np.random.default_rng(seed), []
    with WeightsMap(tensors, prefetch_bytes) as weights:
        for name in random.choice(NAMES, 60):
            held.append((name, weights[name]))
            assert all(is_right(tensor, each) for each, tensor in held)
            held = [each for each in held if random.random() < 0.7]
        held.clear()
        for name in random.choice(NAMES, 40):
            assert is_right(weights[name], name)
            assert weights._buffers._size_bytes <= buffer_bytes(tensors.values(), prefetch_bytes)


@pytest.mark.parametrize("prefetch_bytes", [115_000, 150_000])
def test_orders_that_change_while_tensors_are_read_stay_within_the_limit(tensors, prefetch_bytes, monkeypatch):
    load, random, delays = WeightsTensor.load, np.random.default_rng(5), np.random.default_rng(1)

    def slow(each, memory):
        time.sleep(delays.random() * 0.006)  # what was begun for another order is still being read
        return load(each, memory)

    monkeypatch.setattr(WeightsTensor, "load", slow)
    most = buffer_bytes(tensors.values(), prefetch_bytes)
    with WeightsMap(tensors, prefetch_bytes) as weights:
        for name in random.choice(NAMES, 300):
            weights[name]
            assert weights._buffers._size_bytes <= most


def test_the_first_pass_reads_each_tensor_once_and_nothing_after_the_last(tensors, reads):
    with WeightsMap(tensors, EVERYTHING) as weights:
        for number, name in enumerate(NAMES):
            assert is_right(weights[name], name) and list(weights._loads) == NAMES[number + 1 :]
        assert sorted(reads) == NAMES
        weights["a"]  # another pass: now it is known what comes after the last one
        for name in NAMES[1:]:
            weights[name]
        assert list(weights._loads) == NAMES[:4]


def test_another_order_is_learned(tensors):
    order = ["c", "a", "e", "b", "d"]
    with WeightsMap(tensors, EVERYTHING) as weights:
        for name in [*order, *order]:
            assert is_right(weights[name], name)
        for number, name in enumerate(order):
            assert is_right(weights[name], name)
            assert list(weights._loads) == order[number + 1 :] + order[:number]


def test_what_is_begun_has_room_within_the_bytes_given(tensors, reads):
    two = tensors["b"].dense_bytes + tensors["c"].dense_bytes
    for prefetch_bytes, ahead in ((0, []), (two - 1, ["b"]), (two, ["b", "c"])):
        reads.clear()
        with WeightsMap(tensors, prefetch_bytes) as weights:
            assert is_right(weights["a"], "a") and list(weights._loads) == ahead
        assert set(reads) <= {"a", *ahead}


@pytest.mark.parametrize("name", ["b", "e"])
@pytest.mark.parametrize("prefetch_bytes", [0, EVERYTHING])
def test_damage_is_raised_to_whoever_asks_for_that_tensor_each_time(tensors, name, prefetch_bytes):
    damage(tensors[name])
    with WeightsMap(tensors, prefetch_bytes) as weights:
        for each in NAMES * 2:
            if each == name:
                with pytest.raises(WeightsError, match=f"tensor '{name}', at byte {tensors[name].offset}: "):
                    weights[each]
            else:
                assert is_right(weights[each], each)


def test_closing_twice_with_tensors_begun_leaves_those_that_are_held(tensors):
    weights = WeightsMap(tensors, EVERYTHING)
    held = weights["a"]
    weights.close()
    weights.close()
    del weights
    gc.collect()
    assert is_right(held, "a")


def test_dense_tensors_lie_where_they_were_read(tensors):
    taken = []
    with WeightsMap(tensors, 0) as weights:
        take = weights._buffers.take
        weights._buffers.take = lambda size_bytes: taken.append(take(size_bytes)) or taken[-1]
        found = weights["e"]
    (memory,) = taken
    assert found.data_ptr() == memory.ctypes.data + tensors["e"].offset % 4096
    assert is_right(found, "e")


@pytest.mark.parametrize(("name", "dtype", "as_kept"), DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)])
def test_dense_tensors_of_every_dtype_and_shape(tmp_path, name, dtype, as_kept, shape):
    """An empty tensor that was kept in memory raised a ValueError."""
    values = torch.from_numpy(RNG.integers(0, 2, shape)).to(dtype)
    data = values.reshape(-1).view(torch.uint8).numpy()
    tensors = written(tmp_path / "file", [dense_tensor("x", name, shape, data)])
    with WeightsMap(tensors, in_memory=["x"] if as_kept else []) as weights:
        assert weights["x"].dtype == dtype and torch.equal(weights["x"], values)


def test_a_dtype_that_torch_lacks_is_named(tmp_path):
    tensors = written(tmp_path / "file", [dense_tensor("x", "U32", (2,), np.zeros(8, np.uint8))])
    with WeightsMap(tensors) as weights, pytest.raises(WeightsError, match=r"its dtype must be one of F64, .*not U32"):
        weights["x"]


@pytest.mark.parametrize("form", [list, iter], ids=["list", "iterator"])
def test_kept_tensors_are_not_read_again(tensors, form):
    """Of an iterator, only the first tensor was kept."""
    with WeightsMap(tensors, in_memory=form(NAMES)) as weights:
        tensors["a"].path.unlink()
        first = {name: weights[name] for name in NAMES}
        first["e"].zero_()  # belongs to who asked for it, not to the map
        assert all(is_right(weights[name], name) for name in NAMES)


def test_a_tensor_that_is_kept_already_may_be_named_again(tensors):
    kept = {name: KeptTensor(each) for name, each in tensors.items()}
    with WeightsMap(kept, in_memory=["a", "e"]) as weights:
        assert is_right(weights["a"], "a") and is_right(weights["e"], "e")
    data = kept["a"].load(aligned_buffer)
    kept["a"].check(data)
    assert data is kept["a"].read() and len(data) == tensors["a"].stored_bytes


def test_damage_is_met_when_a_dense_tensor_is_kept(tensors):
    damage(tensors["e"])
    with pytest.raises(WeightsError, match=r"tensor 'e', .* it is damaged: its checksum is another"):
        KeptTensor(tensors["e"])


def test_what_is_in_memory_does_not_wait_for_the_disk(tensors, monkeypatch):
    kept, goes_on = {**tensors, "e": KeptTensor(tensors["e"])}, threading.Event()
    load = WeightsTensor.load
    monkeypatch.setattr(WeightsTensor, "load", lambda each, memory: goes_on.wait(60) and load(each, memory))
    with WeightsMap(kept, EVERYTHING) as weights, ThreadPoolExecutor() as pool:
        try:
            reading = pool.submit(weights.__getitem__, NAMES[0])
            while "e" not in weights._loads:
                time.sleep(0.001)
            assert is_right(pool.submit(weights.__getitem__, "e").result(30), "e") and not reading.done()
        finally:
            goes_on.set()
        assert is_right(reading.result(), NAMES[0])
