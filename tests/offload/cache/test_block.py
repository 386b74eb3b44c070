"""What a block of batches takes of each tier, before it is computed."""

import pytest
import torch

from nearflash.abi.errors import CommandError, StorageFullError
from nearflash.offload.cache.block import BatchShape, Block, BlockShape
from nearflash.offload.cache.kv_storage import DiskStorage, KvForm
from nearflash.offload.tiers.ledger import Budgets, Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import keep_profile
from nearflash.storage.io.queue import QUEUES, usable_queues

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
SHAPE = BlockShape((BatchShape(3, 40), BatchShape(3, 35), BatchShape(1, 20)), 30)
TOKEN = 64 * 4
"""Bytes of a key."""


@pytest.fixture
def config(saved):
    return saved("llama")[1].config


def policy(cache=GPU, activations=GPU, **options):
    return OffloadPolicy(3, 3, GPU, cache, activations, **options)


def block(config, own, ledger, shapes=(SHAPE,), **options):
    options = {"scratch": None, "link": DeviceLink()} | options
    return Block(config, torch.float32, own, shapes, ledger=ledger, **options)


def rows(batch, tokens):
    """Bytes of one layer of one batch: rows of K and V, in whole blocks."""
    return 2 * 2 * batch * -(-tokens * TOKEN // 4096) * 4096


def packed(batch, tokens, bits=16):
    """The same where they pass through a buffer: tokens one after another."""
    return DiskStorage.rest_bytes(KvForm(batch, 2, tokens, 64, torch.float32, bits))


CACHE = 4 * sum(rows(*batch) for batch in SHAPE.batches)
STATES = -(-3 * 30 * 64 * 4 // 4096) * 4096


def test_all_in_memory(config):
    ledger = Ledger()
    with block(config, policy(), ledger) as made:
        assert ledger.held == {"gpu": CACHE + 3 * STATES, "host": 0}
        layers = made.batch(SHAPE, 1)[0].tiered
        assert sorted(layers) == [0, 1, 2, 3]
        assert all(layer.storage is None and layer.work.shape == (2, 3, 2, 35, 64) for layer in layers.values())
    assert not any(ledger.held.values())


def test_host_memory_with_and_without_attention_there(config):
    ledger = Ledger()
    with block(config, policy(HOST, cpu_attention=True), ledger):
        assert ledger.held == {"gpu": 3 * STATES, "host": CACHE}
    with block(config, policy(HOST), ledger) as made:
        held = 4 * sum(packed(*batch) for batch in SHAPE.batches)
        assert ledger.held == {"gpu": 3 * STATES + 3 * packed(3, 40), "host": held} and held < CACHE
        assert all(layer.storage is not None for layer in made.batch(SHAPE, 2)[0].tiered.values())
    with block(config, policy(HOST, overlap=False), ledger):
        assert ledger.held["gpu"] == 3 * STATES + packed(3, 40)


@pytest.mark.parametrize("bits", [16, 4])
def test_attention_on_the_host_beside_a_gpu(config, tmp_path, bits):
    """In place in its memory, in buffers of its memory of what lies on disk; a GPU has codes of 4 bits come to it."""
    ledger, queries = Ledger(), 2 * 3 * (4 + 2 * 2) * TOKEN
    options = {"link": DeviceLink(one_memory=False), "scratch": tmp_path}
    for tier, own in (("host", policy(HOST, cpu_attention=True, cache_bits=bits)),
                      ("disk", policy(DISK, cpu_attention=True, cache_bits=bits))):  # fmt: skip
        with block(config, own, ledger, **options) as made:
            assert made.attends_on_host == (bits == 16)
            assert (ledger.held["gpu"] == 3 * STATES) == (bits == 16)
            if bits == 16:
                moved = CACHE if tier == "host" else 4 * len(SHAPE.batches) * 4096 + 3 * packed(3, 40)
                assert ledger.held["host"] == moved + queries
        assert not any(ledger.held.values())
    with pytest.raises(CommandError, match=r"budget of host must be .* queries and outputs of attention"):
        block(config, policy(DISK, cpu_attention=True), Ledger(Budgets(host=4 * 3 * 4096)), **options)


def test_disk(config, tmp_path):
    ledger = Ledger()
    with block(config, policy(DISK, DISK), ledger, scratch=tmp_path):
        tails = 4 * len(SHAPE.batches) * 4096
        files = [packed(*batch) for batch in SHAPE.batches]
        assert max(files) <= ledger.held["gpu"] // 3 <= rows(3, 40)
        assert ledger.held["host"] == tails and ledger.held["disk"] == 4 * sum(files) + 3 * STATES
        assert not list(tmp_path.iterdir()), "it has no name"
    assert not any(ledger.held.values())


@pytest.mark.parametrize("queue", [name for name, missing in usable_queues().items() if not missing])
def test_the_file_has_the_queue_that_was_measured_and_keeps_its_buffers_ready(config, tmp_path, monkeypatch, queue):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (scratch := tmp_path / "scratch").mkdir()
    keep_profile(scratch, [Rate("random", 4096, 1, *3 * [2.0 if name == queue else 1.0], name) for name in QUEUES],
                 "2026-01-01")  # fmt: skip
    with block(config, policy(DISK), Ledger(), scratch=scratch) as made:
        backend = made._file.backend
        assert backend.queue == queue and len(backend._registered) == 3
        layer = made.batch(SHAPE, 0)[0].tiered[0]
        states = torch.randn((2, 3, 2, 40, 64))
        made.mover.ready(layer)
        layer.work[..., :40, :] = states
        layer.length = 40
        made.mover.finish(layer)
        made.mover.drain()
        made.mover.begin(layer)
        made.mover.ready(layer)
        assert torch.equal(layer.work[..., :40, :], states)
        made.mover.finish(layer)


def test_codes_of_4_bits_take_less(config):
    ledger = Ledger()
    with block(config, policy(HOST, cache_bits=4), ledger):
        assert ledger.held["host"] == 4 * sum(packed(*batch, bits=4) for batch in SHAPE.batches) < CACHE / 5


def test_the_largest_block_counts(config):
    small = BlockShape((BatchShape(1, 20),), 10)
    ledger = Ledger()
    with block(config, policy(), ledger, (small, SHAPE, small)) as made:
        assert ledger.held["gpu"] == CACHE + 3 * STATES
        assert made.batch(small, 0)[0].tiered[0].work.shape == (2, 1, 2, 20, 64)


def test_layers_of_another_rank_take_nothing(config):
    ledger = Ledger()
    with block(config, policy(), ledger, owns=lambda number: number < 2) as made:
        assert ledger.held["gpu"] == CACHE // 2 + 3 * STATES
        layers = made.batch(SHAPE, 0)[0].tiered
        assert layers[3].work is None and layers[3].storage is None and layers[1].work is not None


def test_batches_in_engines_take_nothing(config):
    ledger = Ledger()
    with block(config, policy(Shares(device=0.67, gpu=0.33)), ledger, in_engines=lambda batches: 2) as made:
        assert ledger.held["gpu"] == 4 * rows(1, 20) + 3 * STATES
        assert not made.batch(SHAPE, 0)[0].tiered and len(made.batch(SHAPE, 2)[0].tiered) == 4


def test_a_budget_too_small(config):
    for tier, own in (("gpu", policy()), ("host", policy(HOST)), ("disk", policy(DISK))):
        ledger = Ledger(Budgets(**{tier: 4096}))
        with pytest.raises(CommandError, match=f"budget of {tier} must be .* KV cache"):
            block(config, own, ledger)
        assert not any(ledger.held.values())


def test_no_folder_or_no_room(config, tmp_path, monkeypatch):
    with pytest.raises(CommandError, match="scratch must be a folder"):
        block(config, policy(DISK), Ledger(), scratch=tmp_path / "none")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    ledger = Ledger()
    with pytest.raises(StorageFullError, match="no room while reserving"):
        block(config, policy(DISK), ledger, scratch=tmp_path)
    assert not any(ledger.held.values()) and not list(tmp_path.iterdir())
