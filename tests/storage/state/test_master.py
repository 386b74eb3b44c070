"""Split masters on whole arrays, and in a store: the halves are what its files hold, p is what everyone sees."""

import numpy as np
import pytest

from nearflash.abi.errors import StateError
from nearflash.abi.optimizers import MasterFormat
from nearflash.model.update import state as model
from nearflash.storage import Manifest, StateStore, aligned_buffer
from nearflash.storage.state.manifest import ADAM_ARRAYS, StateArray
from nearflash.storage.state.master import join_master, round_master, split_master

SPLIT = Manifest.pack([("a", (40, 30), "bfloat16"), ("b", (900,), "bfloat16")], 1024, master=MasterFormat.SPLIT)


@pytest.mark.parametrize("nan", [False, True])
def test_equals_the_model(nan):
    rests = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0x0000, 0x8000, 0x0001, 0x3F80, 0xBF81, 0x7F7F, 0xFF7F, *([0x7F80, 0xFF80, 0x7FC0] if nan else [])):
        words = np.uint32(upper << 16) + rests
        halves, joined = split_master(words.view(np.float32)), np.empty(words.size, np.float32)
        expected = model.split_master(words)
        for mine, theirs in zip(halves.values(), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(round_master(words.view(np.float32)), expected[0])
        join_master(halves, joined)
        np.testing.assert_array_equal(joined.view(np.uint32), model.join_master(*expected))


def p_of(step, extent):
    """fp32 bits of step `step`, none of them NaN."""
    memory = aligned_buffer(extent.size_bytes)
    words = np.random.default_rng([step, extent.index]).integers(0, 0x7F800000, extent.params, np.uint32)
    memory.view(np.uint32)[:] = words
    return memory


def test_a_store_reads_and_writes_p_through_its_halves(tmp_path):
    def initial(extent, out):
        out[:] = p_of(0, extent).view(np.float32)

    with StateStore.create(tmp_path / "a", SPLIT, profile="ieee", initial=initial, direct=False) as store:
        assert [array.name for array in store.manifest.arrays] == ["p", "m", "v"]
        for extent in SPLIT.extents:
            store.write("p", extent, p_of(1, extent))
        store.commit((1, 1), extents=SPLIT.extents, arrays=["p"])
    with StateStore.open(tmp_path / "a", direct=False) as store:
        assert store.manifest == SPLIT and store.steps == 1 and store.verify() == []
        whole = np.concatenate([p_of(1, extent).view(np.float32) for extent in SPLIT.extents])
        np.testing.assert_array_equal(store.read_array("p").view(np.uint32), whole.view(np.uint32))
        np.testing.assert_array_equal(store.read_array("weight"), round_master(whole))
        for extent in SPLIT.extents:
            half = aligned_buffer(SPLIT.array("weight").extent_bytes(extent))
            store.read("weight", extent, half)
            assert store.holds("weight", extent, half)
            half[extent.params] ^= 1
            assert not store.holds("weight", extent, half)
        store.rollback()
        np.testing.assert_array_equal(
            store.read_array("p").view(np.uint32),
            np.concatenate([p_of(0, extent).view(np.uint32) for extent in SPLIT.extents]),
        )


def test_half_a_write_is_no_commit(tmp_path):
    create = {"profile": "ieee", "initial": lambda *_: None, "direct": False}
    with StateStore.create(tmp_path / "a", SPLIT, **create) as store:
        (first, *_) = SPLIT.extents
        store.write("weight", first, aligned_buffer(SPLIT.array("weight").extent_bytes(first)))
        with pytest.raises(StateError, match="every extent must be written before a commit; 1 are not"):
            store.commit((1, 1), extents=[first], arrays=["p"])
        assert store.steps == 0


def test_the_manifest_lists_what_the_file_has_and_comes_back():
    body = SPLIT.to_json()
    assert [array["name"] for array in body["arrays"]] == ["weight", "rest", "m", "v"]
    assert Manifest.from_json(body) == SPLIT
    plain = Manifest.pack([("a", (40, 30), "bfloat16"), ("b", (900,), "bfloat16")], 1024)
    assert Manifest.from_json(plain.to_json()) == plain and plain.stored == plain.arrays == SPLIT.arrays
    assert SPLIT.difference(plain) == "master split, not fp32" and SPLIT.difference(SPLIT) is None
    with pytest.raises(StateError, match="arrays must not have the names of a split master's halves, as 'rest' has"):
        Manifest.pack([("a", (3,), "bfloat16")], 1024, (*ADAM_ARRAYS, StateArray("rest", 2)))
    for wrong in (body | {"arrays": body["arrays"][1:]}, body | {"arrays": body["arrays"][1::-1]}):
        with pytest.raises(StateError, match="arrays must begin with"):
            Manifest.from_json(wrong)
    with pytest.raises(StateError, match="a manifest must have no master: its arrays tell"):
        Manifest.from_json(body | {"master": "fp32"})
