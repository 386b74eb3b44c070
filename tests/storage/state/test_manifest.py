"""Layout of tensors in the flat vector, and of the file."""

from itertools import pairwise

import pytest

from nearflash.abi.errors import AlignmentError, StateError
from nearflash.storage.state.layout import StateLayout
from nearflash.storage.state.manifest import ADAM_ARRAYS, Manifest, StateArray

TENSORS = [("a", (3, 7), "float32"), ("b", (), "float32"), ("c", (1, 1000), "bfloat16"), ("d", (0,), "float32")]


def test_tensors_are_padded_to_blocks_of_32():
    manifest = Manifest.pack(TENSORS, 1024)
    assert [(t.start, t.stop, t.params) for t in manifest.tensors] == [
        (0, 32, 21), (32, 64, 1), (64, 1088, 1000), (1088, 1088, 0)]  # fmt: skip
    assert manifest.params == 2048
    assert [(e.start, e.params) for e in manifest.extents] == [(0, 1024), (1024, 1024)]


def test_last_extent_is_shorter():
    assert [e.params for e in Manifest.pack([("a", (5000,), "float32")], 4096).extents] == [4096, 1024]


def test_json_round_trip_and_difference():
    manifest = Manifest.pack(TENSORS, 2048)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.difference(manifest) is None
    assert "'b'" in str(manifest.difference(Manifest.pack([TENSORS[0], ("b", (1,), "float32")], 2048)))
    assert manifest.difference(Manifest.pack(TENSORS[:2], 2048)) == "4 tensors, not 2"
    assert "2048 parameters, not 1024" in str(manifest.difference(Manifest.pack(TENSORS, 1024)))


def test_names_in_an_extent():
    manifest = Manifest.pack(TENSORS, 1024)
    assert manifest.names_in(manifest.extents[0]) == "'a' to 'c'"
    assert manifest.names_in(manifest.extents[1]) == "'c'"


@pytest.mark.parametrize("extent_params", [0, -1024, 1000])
def test_extent_length_must_fill_blocks(extent_params):
    with pytest.raises(AlignmentError, match="extent_params must be a positive multiple of 1024"):
        Manifest.pack(TENSORS, extent_params)


@pytest.mark.parametrize("tensors", [[], [("a", (0,), "float32")]])
def test_no_parameters(tensors):
    """An optimizer whose tensors are all frozen yet: a state of padding alone."""
    manifest = Manifest.pack(tensors, 1024)
    assert manifest.params == 1024 and len(manifest.extents) == 1
    assert Manifest.from_json(manifest.to_json()) == manifest


MX8 = (StateArray("p"), StateArray("m", 1, 1, "exp_avg"), StateArray("m_scale", 1, 32))


def test_arrays_of_other_formats():
    manifest = Manifest.pack(TENSORS, 2048, MX8)
    (extent,) = manifest.extents
    assert [array.extent_bytes(extent) for array in MX8] == [8192, 4096, 4096]
    assert [array.size_bytes(2048) for array in MX8] == [8192, 2048, 64]
    assert MX8[2].size_bytes(33) == 2
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert "name='m', element_bytes=4" in str(
        Manifest.pack(TENSORS, 2048).difference(Manifest.pack(TENSORS, 2048, MX8[:2]))
    )
    assert Manifest.pack(TENSORS, 2048, MX8).difference(Manifest.pack(TENSORS, 2048, MX8[:2])) == "3 arrays, not 2"
    with pytest.raises(StateError, match="array must be one of p, m, m_scale, not 'v'"):
        manifest.array("v")


@pytest.mark.parametrize(
    "arrays, message",
    [
        ((), "arrays must begin with"),
        ((StateArray("m"), StateArray("p")), "arrays must begin with"),
        ((StateArray("p", 2),), "arrays must begin with"),
        ((StateArray("p"), StateArray("m"), StateArray("m")), "different names"),
        ((StateArray("p"), StateArray("m", 1, 3)), "whole elements in 1024 parameters"),
        ((StateArray("p"), StateArray("m", 0)), "whole elements"),
        ((StateArray("p"), StateArray("m", 1, 0)), "whole elements"),
    ],
)
def test_wrong_arrays(arrays, message):
    with pytest.raises(StateError, match=message):
        Manifest.pack(TENSORS, 1024, arrays)


@pytest.mark.parametrize("arrays", [ADAM_ARRAYS, MX8, (StateArray("p"),)])
def test_file_layout_has_no_overlap(arrays):
    manifest = Manifest.pack([("a", (7000,), "float32")], 3072, arrays)
    layout = StateLayout(manifest, 4096, manifest.extents)
    parts = [
        (layout.array_offset(step, array.name, extent), array.extent_bytes(extent))
        for step in (0, 1)
        for extent in manifest.extents
        for array in arrays
    ]
    for (offset, size_bytes), (following, _) in pairwise([*parts, (layout.size_bytes, 0)]):
        assert offset % 4096 == 0 and offset + size_bytes == following
    assert [layout.superblock_offset(0), layout.superblock_offset(1), layout.manifest_offset] == [0, 4096, 8192]
    assert layout.table_offset(0) == 12288 and layout.table_offset(1) + layout.table_bytes == parts[0][0]
