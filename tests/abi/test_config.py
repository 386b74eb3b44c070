"""Build configurations: rules between parameters, and digests that tell configurations apart."""

from dataclasses import replace

import pytest

from nearflash.abi.config import CONFIGS, config
from nearflash.abi.errors import ConfigError


def test_an_unknown_name_lists_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"must be one of .*update-smartssd, update-tiny, not 'update-huge'"):
        config("update-huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 3}, "lanes must be a power of two up to 8, not 3"),
        ({"port_bits": 96}, "port_bits must be 64, 128, 256 or 512"),
        ({"lanes": 8, "port_bits": 256}, "port_bits must be"),
        ({"burst_bytes": 8192}, "burst_bytes must be a divisor of 4096"),
        ({"port_bits": 64, "lanes": 1, "burst_bytes": 4096}, "burst_bytes must be a divisor of 4096 of 1 to 256 beats"),
        ({"outstanding_bursts": 0}, "outstanding_bursts must be between 1 and 32, not 0"),
        ({"state_formats": ("bf16",)}, "state_formats must be fp32 alone, or fp32, bf16, mx8, not"),
    ],
)
def test_parameters_that_do_not_fit_together_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIGS["update-smartssd"], **change)


def test_every_change_of_a_parameter_changes_the_digest() -> None:
    base = CONFIGS["update-smartssd"]
    changed = [replace(base, lanes=2), replace(base, port_bits=256), replace(base, clock_hz=1), replace(base, name="x")]
    assert len({c.digest64 for c in (base, *changed)}) == 5
