"""The back end of HiCache under SGLang's own classes: its abstract class, its factory, its failure injector.

SGLang's engine, and its host pools, want CUDA: a pool here has their memory layouts and the methods that are called.
"""

import random
import time

import pytest

WHY = "SGLang's classes are in .venv-serving: make test-serving"
hicache = pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason=WHY)

import torch  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from nearflash.abi.errors import CommandError, UnsupportedError  # noqa: E402
from nearflash.serving.sglang import NearflashStorage  # noqa: E402

LAYERS, HEADS, WIDTH, PAGE, TOKENS = 2, 2, 16, 4, 64
KEYS = [f"{number:064x}" for number in range(TOKENS // PAGE // 2)]
HALF = torch.arange(TOKENS // 2)
REST = HALF + TOKENS // 2


class HostPool:
    def __init__(self, layout="page_first", page_size=PAGE, dtype=torch.bfloat16):
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        axes = (2, LAYERS, TOKENS) if layout == "layer_first" else (2, TOKENS, LAYERS)
        self.memory = torch.randn(*axes, HEADS, WIDTH).to(dtype)

    def _page(self, index):
        span = slice(index, index + self.page_size)
        return self.memory[:, :, span] if self.layout == "layer_first" else self.memory[:, span]

    def get_data_page(self, index, flat=True):
        return self._page(index).flatten()

    def get_dummy_flat_data_page(self):
        return torch.zeros(self._page(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index, data_page):
        self._page(index)[:] = data_page.reshape(self._page(index).shape)

    def pages(self, indices):
        return [self.get_data_page(at) for at in indices[:: self.page_size].tolist()]


def configure(folder, *, page=PAGE, extra=None, **ranks):
    settings = {"backend_name": "nearflash", "module_path": "nearflash.serving.sglang", "interface_v1": 1}
    settings |= {"class_name": "NearflashStorage", "path": str(folder), "capacity_bytes": 2 << 20, "direct": False}
    usual = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    usual |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    return hicache.HiCacheStorageConfig(
        **(usual | ranks), model_name="a/model", logical_page_size=page, extra_config=settings | (extra or {})
    )


@pytest.fixture
def attach(tmp_path):
    """As SGLang's controller does it; closes what it made."""
    made = []

    def attach(pool=None, others=None, config=None, **options):
        pool = pool or HostPool()
        storage = StorageBackendFactory.create_backend("dynamic", config or configure(tmp_path, **options), pool)
        made.append(storage)
        storage.register_mem_pool_host(pool)
        for name, other in (others or {}).items():
            storage.register_mem_host_pool_v2(other, name)
        storage.on_host_pools_registered()
        return pool, storage

    yield attach
    for storage in made:
        storage.close()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_are_there_after_a_restart(attach, layout):
    pool, storage = attach(HostPool(layout))
    assert storage.batch_exists(KEYS) == 0 and storage.batch_get_v1(KEYS, REST) == [False] * len(KEYS)
    assert storage.batch_set_v1(KEYS, HALF) == [True] * len(KEYS)
    stored = pool.pages(HALF)
    storage.close()
    pool, storage = attach(HostPool(layout))
    assert storage.batch_exists([*KEYS, "another"]) == len(KEYS)
    assert storage.batch_get_v1(KEYS, REST) == [True] * len(KEYS)
    assert all(map(torch.equal, pool.pages(REST), stored))


def test_flat_pages_and_single_ones(attach):
    pool, storage = attach()
    pages = pool.pages(HALF)
    assert storage.batch_set(KEYS, pages) and storage.set("one", pages[0])
    assert storage.exists("one") and not storage.exists("two") and storage.get("two") is None
    assert torch.equal(storage.get("one"), pages[0])
    target = torch.empty_like(pages[1])
    assert storage.get(KEYS[1], target) is target and torch.equal(target, pages[1])
    with pytest.raises(CommandError, match="a page for each of 1 keys"):
        storage.set("three")


@pytest.mark.parametrize(
    "other",
    [{"tp_rank": 1}, {"tp_size": 4}, {"pp_rank": 1, "pp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2},
     {"dp_rank": 1}, {"page": 8}, {"extra": {"namespace": "v2"}}],
)  # fmt: skip
def test_another_rank_or_page_size_has_no_hits(attach, tmp_path, other):
    attach()[1].batch_set_v1(KEYS, HALF)
    assert attach(**other)[1].batch_exists(KEYS) == 0
    assert len(list(tmp_path.glob("*.blocks"))) == 2


@pytest.mark.parametrize("pool", [HostPool("layer_first"), HostPool(dtype=torch.float16)])
def test_another_layout_or_dtype_has_no_hits(attach, pool):
    attach()[1].batch_set_v1(KEYS, HALF)
    assert attach(pool)[1].batch_exists(KEYS) == 0


def test_a_flipped_bit_is_a_miss_and_the_other_pages_are_served(attach, tmp_path):
    pool, storage = attach()
    storage.batch_set_v1(KEYS, HALF)
    (path,) = tmp_path.glob("*.blocks")
    page = bytes(pool.pages(HALF)[2].view(torch.uint8).numpy())
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(page) + 5)
        file.write(bytes([page[5] ^ 1]))
    before = pool.pages(REST)
    assert storage.batch_get_v1(KEYS, REST) == [number != 2 for number in range(len(KEYS))]
    assert torch.equal(pool.pages(REST)[2], before[2]) and torch.equal(pool.pages(REST)[3], pool.pages(HALF)[3])
    assert storage.batch_exists(KEYS) == 2


def test_a_drive_that_hangs_is_a_miss_at_the_deadline(attach):
    pool, storage = attach(extra={"deadline_s": 0.2})
    storage.batch_set_v1(KEYS, HALF)
    (file,) = storage._kv.store._files
    read, file._load_all = file._load_all, lambda *arguments: (time.sleep(1), read(*arguments))
    before, start = pool.memory.clone(), time.monotonic()
    assert storage.batch_get_v1(KEYS, REST) == [False] * len(KEYS) and time.monotonic() - start < 0.9
    storage.close()
    assert torch.equal(pool.memory, before) and storage._loads.expired == 1


def test_under_sglangs_failure_injector_what_is_loaded_is_what_was_stored(attach, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    pool, storage = attach()
    assert isinstance(storage, hicache.HiCacheStorageFailureInjector)
    wanted, loaded, draw = pool.pages(HALF), 0, random.Random(7)
    for _ in range(60):
        at = draw.randrange(len(KEYS))
        here, there = HALF[at * PAGE :][:PAGE], REST[at * PAGE :][:PAGE]
        storage.batch_set_v1([KEYS[at]], here)
        pool.memory[:, REST] = 0
        (served,) = storage.batch_get_v1([KEYS[at]], there)
        assert torch.equal(pool.pages(there)[0], wanted[at] if served else torch.zeros_like(wanted[at]))
        loaded += served
    assert loaded > 10


def test_pools_beside_the_keys_and_values(attach, tmp_path):
    mamba, late = HostPool(page_size=1, dtype=torch.float32), HostPool()
    _, storage = attach(others={hicache.PoolName.MAMBA: mamba})
    transfer = hicache.PoolTransfer(hicache.PoolName.MAMBA, torch.tensor([3, 5]), keys=KEYS[1:3],
                                    hit_policy=hicache.PoolHitPolicy.TRAILING_PAGES)  # fmt: skip
    assert storage.batch_set_v1(KEYS[:4], HALF[: 4 * PAGE]) == [True] * 4
    assert storage.batch_set_v2([transfer]) == {hicache.PoolName.MAMBA: [True, True]}
    found = storage.batch_exists_v2(KEYS, [transfer])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert found.extra_pool_hit_pages == {hicache.PoolName.KV: 4, hicache.PoolName.MAMBA: 3}
    wanted, mamba.memory[:] = mamba.pages(torch.tensor([3])), 0
    assert storage.batch_get_v2([transfer]) == {hicache.PoolName.MAMBA: [True, True]}
    assert torch.equal(mamba.pages(torch.tensor([3]))[0], wanted[0])
    every = hicache.PoolTransfer(hicache.PoolName.MAMBA, keys=KEYS[:1])
    assert storage.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    storage.register_mem_host_pool_v2(late, hicache.PoolName.DRAFT)
    unknown = hicache.PoolTransfer(hicache.PoolName.DRAFT, HALF[:PAGE], keys=KEYS[:1])
    assert storage.batch_set_v2([unknown]) == storage.batch_get_v2([unknown]) == {hicache.PoolName.DRAFT: [False]}
    assert sum(path.stat().st_size for path in tmp_path.glob("*.blocks")) <= 2 << 20


def test_what_it_cannot_keep_is_refused_by_name(attach, tmp_path, monkeypatch):
    _, storage = attach()
    with pytest.raises(CommandError, match="host_indices must be 4 for each of 8 pages"):
        storage.batch_set_v1(KEYS, HALF[:5])
    groups = hicache.PoolTransfer(hicache.PoolName.KV, hit_policy=hicache.PoolHitPolicy.BLOCK_GROUPS)
    with pytest.raises(UnsupportedError, match="must be all_pages or trailing_pages"):
        storage.batch_exists_v2(KEYS, [groups])
    assert storage.clear() is False
    with pytest.raises(UnsupportedError, match="one tensor-parallel rank, not 2"):
        attach(is_mla_model=True)
    with pytest.raises(CommandError, match="capacity_bytes must be a whole number, not None"):
        attach(config=configure(tmp_path, extra={"capacity_bytes": None}))
    monkeypatch.setattr(hicache.HiCacheStorage, "batch_get_v1", lambda self, keys: [])
    with pytest.raises(UnsupportedError, match=r"SGLang must call batch_get_v1\('keys', 'host_indices'"):
        NearflashStorage(configure(tmp_path))
