"""A small state whose contents follow from its step, on one or two files."""

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest

from nearflash.storage import Manifest, StateStore, aligned_buffer
from nearflash.storage.state.manifest import ADAM_ARRAYS

SHAPES = {"embed": (40, 30), "norm": (30,), "head": (900,)}
MANIFEST = Manifest.pack([(name, shape, "float32") for name, shape in SHAPES.items()], 1024)


def values(manifest, array, step):
    """Bytes that step `step` stores in an array, (elements,) of it."""
    stored = manifest.array(array)
    size_bytes = stored.size_bytes(manifest.params)
    if step == 0 and array != "p":
        return np.zeros(size_bytes, np.uint8)
    seed = [step, manifest.arrays.index(stored)]
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def memory_of(manifest, array, extent, step):
    stored = manifest.array(array)
    memory = aligned_buffer(stored.extent_bytes(extent))
    part = values(manifest, array, step)[stored.size_bytes(extent.start) : stored.size_bytes(extent.stop)]
    memory[: part.size] = part
    return memory


def create(paths, manifest=MANIFEST, **kwargs):
    def initial(extent, out):
        out.view(np.uint8)[:] = memory_of(manifest, "p", extent, 0)

    return StateStore.create(paths, manifest, profile="ieee", initial=initial, **kwargs)


def write_step(store):
    for extent in store.manifest.extents:
        for array in store.manifest.arrays:
            store.write(array.name, extent, memory_of(store.manifest, array.name, extent, store.steps + 1))


def tensor_steps(store, step):
    return (step, *[max(step - 1, 0)] * (len(store.manifest.tensors) - 1))


def advance(store, steps=1):
    for _ in range(steps):
        write_step(store)
        step = store.steps + 1
        store.commit(tensor_steps(store, step), {"cursor": step})


def assert_exact(store):
    """Every stored byte is that of the store's own step."""
    for extent in store.manifest.extents:
        for array in store.manifest.arrays:
            memory = aligned_buffer(array.extent_bytes(extent))
            store.read(array.name, extent, memory)
            assert np.array_equal(memory, memory_of(store.manifest, array.name, extent, store.steps))
    assert store.tensor_steps == tensor_steps(store, store.steps)
    assert store.metadata == ({"cursor": store.steps} if store.steps else {})


@pytest.fixture(scope="session")
def small():
    """How to make, advance and check a store."""
    return SimpleNamespace(
        manifest=MANIFEST, arrays=ADAM_ARRAYS, values=values, create=create, write_step=write_step, advance=advance,
        tensor_steps=tensor_steps, assert_exact=assert_exact, memory_of=memory_of,
    )  # fmt: skip


@pytest.fixture(params=[1, 2], ids=["one-file", "two-files"])
def paths(request, tmp_path):
    """Names for the files of a state."""
    return [tmp_path / f"state-{index}" for index in range(request.param)]


@pytest.fixture
def stored(paths):
    """A state at step 3."""
    with create(paths) as store:
        advance(store, 3)
    return paths


@pytest.fixture
def path(tmp_path):
    """A state at step 3 in one file."""
    with create([tmp_path / "state"]) as store:
        advance(store, 3)
    return tmp_path / "state"


@pytest.fixture
def pair(tmp_path):
    """A state at step 3 in two files."""
    both = [tmp_path / "state-a", tmp_path / "state-b"]
    with create(both) as store:
        advance(store, 3)
    return both


@pytest.fixture
def mount_read_only(monkeypatch):
    """A function of paths that cannot be opened to write from then on, by root neither."""

    def mount(*paths):
        def open_there(path, flags, *more, **options):
            if path in paths and flags & (os.O_RDWR | os.O_WRONLY):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return opened(path, flags, *more, **options)

        opened = os.open
        monkeypatch.setattr(os, "open", open_there)

    return mount
