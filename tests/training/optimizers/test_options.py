"""What settings make of what was left out."""

import pytest

from nearflash.storage.state.manifest import EXTENT_PARAMS
from nearflash.training.gradients.compression import TopK
from nearflash.training.optimizers.options import CACHED_EXTENT_PARAMS, Settings


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({}, CACHED_EXTENT_PARAMS),
        ({"overlap": "backward"}, CACHED_EXTENT_PARAMS),
        ({"state_format": "mx8"}, EXTENT_PARAMS),
        ({"compression": TopK(0.01)}, EXTENT_PARAMS),
        ({"resident_bytes": 1}, EXTENT_PARAMS),
        ({"resident_bytes": 1, "extent_params": 2048}, 2048),
    ],
)
def test_extents_are_small_where_the_drive_sets_the_pace_by_default(tmp_path, given, params):
    assert Settings(path=tmp_path, **given).new_extent_params == params
