"""The self test of the expand kernel: what it compares, and that it sees a wrong bit."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.device import open_device
from nearflash.device.backends.host.expand import ExpandHostDevice
from nearflash.device.selftest.expand import MATRIX_FORMATS, compare_matrices


def test_every_format_at_three_densities():
    with open_device("host:expand-tiny") as device:
        found = list(compare_matrices(device, columns=70, seed=1))
    assert len(found) == 3 * len(MATRIX_FORMATS)
    assert all((each.words, each.mismatches) == (5 * 70, 0) for each in found)
    assert found[4].case.split() == ["bf16", "0.5"]


def test_a_wrong_bit_is_seen(monkeypatch):
    expand = ExpandHostDevice._expand

    def spoiled(self, stream, out):
        values = expand(self, stream, out)
        out[:, 0] ^= 1
        return values

    monkeypatch.setattr(ExpandHostDevice, "_expand", spoiled)
    with open_device("host:expand-tiny") as device:
        assert all(each.mismatches == 5 for each in compare_matrices(device, columns=70, seed=1))


def test_columns_that_the_build_has_no_room_for():
    with open_device("host:expand-tiny") as device, pytest.raises(CommandError, match="between 1 and 1024, not 1025"):
        list(compare_matrices(device, columns=1025, seed=1))
