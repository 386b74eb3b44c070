"""What settings make of what was left out."""

import pytest

from nearflash.storage.manifest import EXTENT_PARAMS
from nearflash.training.settings import Settings


@pytest.mark.parametrize(
    ("given", "state_format", "params"),
    [(None, "fp32", EXTENT_PARAMS), (None, "mx8", 2 * EXTENT_PARAMS), (2048, "mx8", 2048)],
)
def test_extents_of_narrow_state_have_more_parameters_unless_told(tmp_path, given, state_format, params):
    settings = Settings(path=tmp_path, extent_params=given, state_format=state_format)
    assert settings.new_extent_params == params
