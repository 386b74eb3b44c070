import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.nand import NandTiming


def test_cycles_are_rounded_up():
    assert [NandTiming.cycles(ns, 285_000_000) for ns in (0, 1, 25, 100)] == [0, 1, 8, 29]


def test_times_must_be_positive():
    with pytest.raises(ConfigError, match=r"^read_ns must be positive, not 0$"):
        NandTiming(0, 1, 1, 1)
