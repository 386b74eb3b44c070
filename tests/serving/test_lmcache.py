"""The L2 adapter under LMCache's own classes: its abstract class, its plugins' factory, its fault injector.

LMCache's server and its copies from GPUs want CUDA; keys, memory objects, bitmaps and events are its own here.
"""

import os
import select
import time

import pytest

WHY = "LMCache's classes are in .venv-serving: make test-serving"
base = pytest.importorskip("lmcache.v1.distributed.l2_adapters.base", reason=WHY)

import torch  # noqa: E402
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry  # noqa: E402
from lmcache.v1.distributed.l2_adapters.fault_inject_l2_adapter import FaultInjectL2Adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # noqa: E402

from nearflash.abi.errors import CommandError, UnsupportedError  # noqa: E402
from nearflash.serving.lmcache import NearflashAdapter  # noqa: E402

SHAPE = torch.Size([2, 2, 16, 64])
BYTES = SHAPE.numel() * 2
KEYS = [ObjectKey(bytes([number]) * 32, "a/model", 0) for number in range(6)]


def memory(fill=None, dtype=torch.bfloat16):
    data = torch.randn(SHAPE) if fill is None else torch.full(SHAPE, float(fill))
    raw = data.to(dtype).view(torch.uint8).flatten()
    facts = MemoryObjMetadata(SHAPE, dtype, 0, len(raw), 1, fmt=MemoryFormat.KV_2LTD, shapes=[SHAPE], dtypes=[dtype])
    return TensorMemoryObj(raw, facts, None)


def layouts(dtype=torch.bfloat16):
    return {0: MemoryLayoutDesc([SHAPE], [dtype])}


@pytest.fixture
def attach(tmp_path):
    """An adapter as LMCache makes it from a plugin's configuration."""
    made = []

    def attach(**params):
        given = {"path": str(tmp_path), "capacity_bytes": 1 << 20, "block_bytes": BYTES, "direct": False} | params
        config = PluginL2AdapterConfig("nearflash.serving.lmcache", "NearflashAdapter", given)
        made.append(create_l2_adapter_from_registry(config))
        return made[-1]

    yield attach
    for adapter in made:
        adapter.close()


def wait(fd):
    assert select.select([fd], [], [], 10)[0], "its event must come"
    os.read(fd, 8)


def store(adapter, keys, objects):
    task = adapter.submit_store_task(keys, objects)
    wait(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def look_up(adapter, keys, groups=None):
    task = adapter.submit_lookup_and_lock_task(keys, layouts() if groups is None else groups)
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return found.get_indices_list()


def load(adapter, keys, objects):
    task = adapter.submit_load_task(keys, objects)
    wait(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return loaded.get_indices_list()


def test_objects_are_there_after_a_restart(attach):
    adapter, objects = attach(), [memory() for _ in KEYS]
    assert look_up(adapter, KEYS) == []
    result = store(adapter, KEYS[:4], objects[:4])
    assert result.is_successful() and result.bytes_transferred() == 4 * BYTES
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3 and adapter.get_usage().total_bytes_used == 4 * BYTES
    adapter.close()
    adapter, targets = attach(), [memory(0) for _ in KEYS]
    assert look_up(adapter, KEYS) == [0, 1, 2, 3] and load(adapter, KEYS, targets) == [0, 1, 2, 3]
    assert all(torch.equal(one.raw_data, other.raw_data) for one, other in zip(targets, objects[:4], strict=False))
    assert not targets[4].raw_data.any()


@pytest.mark.parametrize("other", [{"kv_rank": 1}, {"model_name": "b/model"}, {"object_group_id": 1},
                                   {"cache_salt": "user"}])  # fmt: skip
def test_another_rank_model_group_or_user_has_no_hits(attach, other):
    adapter = attach()
    store(adapter, KEYS[:1], [memory()])
    key = ObjectKey(**({"chunk_hash": KEYS[0].chunk_hash, "model_name": "a/model", "kv_rank": 0} | other))
    assert look_up(adapter, [key], layouts() | {1: layouts()[0]}) == [] and load(adapter, [key], [memory(0)]) == []


def test_another_dtype_or_namespace_or_no_layout_has_no_hits(attach):
    adapter = attach()
    store(adapter, KEYS[:1], [memory()])
    assert look_up(adapter, KEYS[:1], layouts(torch.float16)) == look_up(adapter, KEYS[:1], {}) == []
    assert load(adapter, KEYS[:1], [memory(0, torch.float16)]) == []
    assert look_up(attach(namespace="v2"), KEYS[:1]) == []


def test_locked_objects_are_not_evicted(attach):
    adapter = attach(capacity_bytes=16 * BYTES + (1 << 17))
    store(adapter, KEYS[:1], [memory(3)])
    assert look_up(adapter, KEYS[:1]) == look_up(adapter, KEYS[:1]) == [0]
    adapter.submit_unlock([*KEYS[:1], KEYS[5]])
    for number in range(60):
        store(adapter, [ObjectKey(number.to_bytes(32, "big"), "a/model", 0)], [memory()])
    assert adapter.report_status()["evicted"] > 0 and load(adapter, KEYS[:1], [memory(0)]) == [0]
    adapter.submit_unlock(KEYS[:1])
    assert adapter.report_status()["pinned"] == 0


def test_a_flipped_bit_is_a_miss_and_the_others_are_loaded(attach, tmp_path):
    adapter, objects = attach(), [memory() for _ in KEYS]
    store(adapter, KEYS, objects)
    (path,) = tmp_path.glob("*.blocks")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(bytes(objects[2].byte_array)) + 9)
        file.write(bytes([bytes(objects[2].byte_array)[9] ^ 4]))
    targets = [memory(0) for _ in KEYS]
    assert load(adapter, KEYS, targets) == [0, 1, 3, 4, 5] and not targets[2].raw_data.any()
    assert look_up(adapter, KEYS) == [0, 1, 3, 4, 5] and adapter.report_status()["damaged"] == 1


def test_a_drive_that_hangs_is_a_miss_at_the_deadline(attach):
    adapter = attach(deadline_s=0.2)
    store(adapter, KEYS, [memory() for _ in KEYS])
    (file,) = adapter._store._files
    read, file._load_all = file._load_all, lambda *arguments: (time.sleep(1), read(*arguments))
    targets, start = [memory(0) for _ in KEYS], time.monotonic()
    task = adapter.submit_load_task(KEYS, targets)
    assert time.monotonic() - start < 0.1, "the caller does not wait"
    wait(adapter.get_load_event_fd())
    assert adapter.query_load_result(task).popcount() == 0 and time.monotonic() - start < 0.9
    adapter.close()
    assert not any(one.raw_data.any() for one in targets) and adapter.report_status()["expired"] == 1


def test_under_lmcaches_fault_injector_what_is_loaded_is_what_was_stored(attach):
    adapter = FaultInjectL2Adapter(attach(), rate=0.5, seed=1, gap_indices=(2,))
    objects = [memory() for _ in KEYS]
    store(adapter, KEYS, objects)
    targets = [memory(0) for _ in KEYS]
    loaded = load(adapter, KEYS, targets)
    assert look_up(adapter, KEYS) == [0, 1, 2, 3, 4, 5] and 0 < len(loaded) < len(KEYS) and 2 not in loaded
    assert all(torch.equal(targets[at].raw_data, objects[at].raw_data) for at in loaded)


def test_what_it_cannot_keep_is_refused_by_name(attach, tmp_path, monkeypatch, caplog):
    adapter = attach(block_bytes=BYTES - 1)
    assert not store(adapter, KEYS[:1], [memory()]).is_successful()
    assert f"a block must have 1 to {BYTES - 1} bytes, not {BYTES}" in caplog.text
    with pytest.raises(CommandError, match="block_bytes must be the most bytes that an object has, not None"):
        attach(block_bytes=None)
    monkeypatch.setattr(base.L2AdapterInterface, "submit_unlock", lambda self, keys, force: None)
    with pytest.raises(UnsupportedError, match=r"LMCache must call submit_unlock\('keys',\) of a tier"):
        NearflashAdapter({"path": str(tmp_path)})
