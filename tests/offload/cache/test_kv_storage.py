"""Keys and values at rest are what was stored, wherever and however often a visit comes."""

import numpy as np
import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.offload.cache.groups import decode, encode
from nearflash.offload.cache.kv_storage import DiskStorage, KvForm, MemoryStorage
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import host_memory
from nearflash.storage.io.direct import DirectFile

TOKENS = 150


def form(dim=64, dtype=torch.bfloat16, bits=16, batch=2, heads=3):
    return KvForm(batch, heads, TOKENS, dim, dtype, bits)


@pytest.fixture
def kv_storage(tmp_path):
    """Makes the storage of a form; in memory, or in the middle of a file."""
    files = []

    def make(kind, own, ledger):
        if kind == "memory":
            return MemoryStorage(own, host_memory(MemoryStorage.rest_bytes(own)), ledger)
        size = DiskStorage.rest_bytes(own)
        files.append(DirectFile.create(tmp_path / f"file-{len(files)}", 3 * size))
        return DiskStorage(own, files[-1], size, ledger)

    yield make
    for file in files:
        file.close()


def fresh(held):
    """A work buffer with nothing in it that was stored."""
    memory = host_memory(held.form.dense.size_bytes + held.form.size_bytes)
    memory.fill_(0x7F)
    return held.states(memory), memory


def as_stored(states, own):
    """What comes back: through codes of 4 bits, or as it was."""
    if own.bits == 16:
        return states
    back = torch.empty_like(states)
    decode(encode(states), back)
    return back


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (80, torch.float32), (8, torch.float16)])
def test_every_token_comes_back(kv_storage, kind, bits, dim, dtype):
    """A prompt, then visits of one to a few tokens, each in a buffer that held something else."""
    own, generator = form(dim, dtype, bits), torch.Generator().manual_seed(dim + bits)
    ledger = Ledger()
    held = kv_storage(kind, own, ledger)
    states = torch.randn((2, own.batch, own.heads, TOKENS, dim), generator=generator).to(dtype)
    expected, length = as_stored(states, own), 0
    rng = np.random.default_rng(dim)
    while length < TOKENS:
        new = min(int(rng.choice([1, 2, 5, 60])) if length else 47, TOKENS - length)
        work, memory = fresh(held)
        if length:
            held.load(memory, 0, length)
            assert torch.equal(work[..., :length, :], expected[..., :length, :]), length
        work[..., length : length + new, :] = states[..., length : length + new, :]
        held.store(memory, length, length + new)
        length += new
    work, memory = fresh(held)
    held.load(memory, 0, TOKENS)
    assert torch.equal(work, expected)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("first", [1, 33, 100, 149])
def test_a_window_alone_is_loaded(kv_storage, kind, bits, first):
    own = form(bits=bits)
    ledger = Ledger()
    held = kv_storage(kind, own, ledger)
    states = torch.randn((2, own.batch, own.heads, TOKENS, own.dim)).to(own.dtype)
    work, memory = fresh(held)
    work.copy_(states)
    held.store(memory, 0, TOKENS)
    ledger.links.clear()
    held.load(fresh(held)[1], 0, TOKENS)
    every = sum(ledger.links.values())
    ledger.links.clear()
    work, memory = fresh(held)
    held.load(memory, first, TOKENS)
    assert torch.equal(work[..., first:, :], as_stored(states, own)[..., first:, :])
    if first >= 100 and (kind == "memory" or bits == 16):  # a row of codes has one whole block
        assert sum(ledger.links.values()) < every


def test_a_window_that_moves_is_stored_and_loaded(kv_storage):
    """Only what is visible is loaded; what is stored after it joins whole blocks all the same."""
    own, ledger = form(), Ledger()
    held = kv_storage("disk", own, ledger)
    states = torch.randn((2, own.batch, own.heads, TOKENS, own.dim)).to(own.dtype)
    for length in range(TOKENS):
        work, memory = fresh(held)
        first = max(length - 7, 0)
        if length:
            held.load(memory, first, length)
            assert torch.equal(work[..., first:length, :], states[..., first:length, :])
        work[..., length, :] = states[..., length, :]
        held.store(memory, length, length + 1)
    work, memory = fresh(held)
    held.load(memory, 0, TOKENS)
    assert torch.equal(work, states)


def test_blocks_are_written_once_and_whole(kv_storage):
    own, ledger = form(), Ledger()
    held = kv_storage("disk", own, ledger)
    _, memory = fresh(held)
    for length in range(TOKENS):
        held.store(memory, length, length + 1)
    assert ledger.links == {"cache host to disk": TOKENS * own.rows * 128 // 4096 * 4096}


def test_a_visit_reads_and_writes_what_lies_together(kv_storage, monkeypatch):
    """A few large requests, not one for each sequence and head."""
    own, calls = form(dim=256, dtype=torch.float32, batch=16), []
    held = kv_storage("disk", own, Ledger())
    for name in ("read", "write", "read_many"):
        whole = getattr(DirectFile, name)
        monkeypatch.setattr(DirectFile, name, lambda *args, name=name, whole=whole: calls.append(name) or whole(*args))
    _, memory = fresh(held)
    held.store(memory, 0, 100)
    held.load(memory, 0, 100)
    held.store(memory, 100, 101)
    assert calls.count("write") == 2 and calls.count("read_many") == 1 and calls.count("read") <= 1


def test_units_of_a_file_keep_apart(tmp_path):
    own, ledger = form(), Ledger()
    size = DiskStorage.rest_bytes(own)
    with DirectFile.create(tmp_path / "file", 3 * size) as file:
        rests = [DiskStorage(own, file, place * size, ledger) for place in range(3)]
        states = [torch.full((2, own.batch, own.heads, TOKENS, own.dim), float(n + 1)).to(own.dtype) for n in range(3)]
        for held, own_states in zip(rests, states, strict=True):
            work, memory = fresh(held)
            work.copy_(own_states)
            held.store(memory, 0, TOKENS)
        for held, own_states in zip(rests, states, strict=True):
            work, memory = fresh(held)
            held.load(memory, 0, TOKENS)
            assert torch.equal(work, own_states)


@pytest.mark.parametrize(
    ("dim", "dtype", "bits", "token"),
    [
        (64, torch.bfloat16, 16, 128),
        (80, torch.float32, 16, 320),
        (64, torch.float16, 4, 36),
        (80, torch.float16, 4, 72),
    ],
)  # fmt: skip
def test_sizes(dim, dtype, bits, token):
    own = form(dim, dtype, bits)
    assert own.token_bytes == token
    assert own.rows == 12
    assert own.row_bytes % 4096 == 0 and 0 <= own.row_bytes - TOKENS * token < 4096
    assert own.size_bytes == 12 * own.row_bytes
    states = own.dense.states(host_memory(own.dense.size_bytes))
    assert states.shape == (2, 2, 3, TOKENS, dim) and states.dtype is dtype


@pytest.mark.parametrize("bits", [16, 4])
def test_other_bytes_than_were_written_are_an_error(tmp_path, bits):
    """They had no checksum: attention was computed with whatever came back."""
    own = KvForm(2, 3, TOKENS, 1280, torch.bfloat16, bits)
    size, generator = DiskStorage.rest_bytes(own), torch.Generator().manual_seed(bits)
    with DirectFile.create(tmp_path / "file", 2 * size) as file:
        rests = [DiskStorage(own, file, place, Ledger(), f"layer {place // size}") for place in (0, size)]
        for first, last in ((0, 100), (100, TOKENS)):
            for held in rests:
                work, memory = fresh(held)
                if first:
                    held.load(memory, 0, first)
                states = torch.randn((2, own.batch, own.heads, last - first, own.dim), generator=generator)
                work[..., first:last, :] = states.to(own.dtype)
                held.store(memory, first, last)
        right, block = host_memory(4096).numpy(), host_memory(4096).numpy()
        for at in (0, size // 2 // 4096 * 4096, (size // 4096 - 2) * 4096):
            file.read(at, right)
            rotten = right.copy()
            rotten[77] ^= 4
            file.read(size + at, block)
            for wrong in (rotten, block):  # and what another layer has there
                block[:] = wrong
                file.write(at, block)
                with pytest.raises(StateError, match="keys and values of layer 0 must be those that were written"):
                    rests[0].load(fresh(rests[0])[1], 0, TOKENS)
            rests[1].load(fresh(rests[1])[1], 0, TOKENS)
            file.write(at, right)
        rests[0].load(fresh(rests[0])[1], 0, TOKENS)
