"""Layout of tensors in the flat vector, and of the file."""

import pytest

from nearflash.abi.errors import AlignmentError, ShapeError
from nearflash.storage.layout import ARRAYS, Layout
from nearflash.storage.manifest import Manifest

TENSORS = [("a", (3, 7), "float32"), ("b", (), "float32"), ("c", (1, 1000), "bfloat16"), ("d", (0,), "float32")]


def test_tensors_are_padded_to_sixteen():
    manifest = Manifest.pack(TENSORS, 1024)
    assert [(t.start, t.stop, t.params) for t in manifest.tensors] == [
        (0, 32, 21), (32, 48, 1), (48, 1056, 1000), (1056, 1056, 0)]  # fmt: skip
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
    with pytest.raises(ShapeError, match="at least one element"):
        Manifest.pack(tensors, 1024)


def test_file_layout_has_no_overlap():
    layout = Layout(Manifest.pack(TENSORS, 1024), 4096)
    offsets = [layout.array_offset(step, array) for step in (0, 1) for array in ARRAYS]
    assert offsets == list(range(offsets[0], layout.size_bytes, 4 * layout.manifest.params))
    assert [layout.superblock_offset(0), layout.superblock_offset(1), layout.manifest_offset] == [0, 4096, 8192]
    assert layout.table_offset(1) + layout.table_bytes == offsets[0]
    assert all(offset % 4096 == 0 for offset in (*offsets, layout.table_offset(0), layout.table_offset(1)))
