"""CRC32C equals a package of others for every length, place and beginning."""

import numpy as np
import pytest
from crc32c import crc32c as package

from nearflash.storage.io import checksum
from nearflash.storage.io.checksum import copy_checked, crc32c, crc32c_each, crc32c_rows
from nearflash.support.native import CompileError, find_address


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(4).integers(0, 256, (300 << 10) + 64, np.uint8)


def test_the_check_value_of_the_standard():
    """RFC 3720, B.4: 32 bytes of zeros; and the usual check value."""
    assert crc32c(np.zeros(32, np.uint8)) == 0x8A9136AA
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@pytest.mark.parametrize("name", ["crc32c", "crc32c_by_table"])
def test_the_loop_is_the_packages_for_every_short_length_and_place(data, name):
    loop = getattr(checksum._loops(), name)
    for length in (*range(1, 700), 8191, 8192, 3 * 8192 + 5):
        part = data[length % 13 :][:length]
        assert loop(find_address(part), length, length * 77) == package(part, length * 77)


@pytest.mark.parametrize("name", ["crc32c", "crc32c_by_table"])
def test_a_loop_by_instruction_and_by_table_equals_the_library(data, name):
    loop = getattr(checksum._loops(), name)
    long = (3 * 8192 - 8, 3 * 8192, 3 * 8192 + 3 * 256 + 16, 59_904)
    for size in (0, 8, 64, 504, 512, 520, 3 * 256 - 8, 3 * 256, 3 * 256 + 8, 1032, *long):
        for start in (0, 1, 64):
            assert int(loop(data.ctypes.data + start, size, 0)) == package(data[start : start + size])


@pytest.mark.parametrize("length", [(128 << 10) - 1, 128 << 10, (128 << 10) + 1, 300 << 10])
@pytest.mark.parametrize("place", [0, 1, 8, 63])
def test_long_data(data, length, place):
    part = data[place:][:length]
    assert crc32c(part, 5) == package(part, 5)
    assert crc32c(part[1000:], crc32c(part[:1000])) == package(part)


def test_without_a_compiler_the_package_does_it(data, monkeypatch):
    def refuse(source):
        raise CompileError("no compiler", "")

    monkeypatch.setattr(checksum, "load_library", refuse)
    monkeypatch.setattr(checksum, "_loops", checksum._loops.__wrapped__)
    assert crc32c(data) == package(data)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("lengths", [[0, 1, 4096, 77], [200 << 10, 0, 64 << 10, 5]])
def test_of_several_blocks_the_good_ones_are_copied(data, monkeypatch, lengths, compiled):
    if not compiled:
        monkeypatch.setattr(checksum, "_loops", lambda: None)
    blocks = [data[number:][:length] for number, length in enumerate(lengths)]
    before = np.array([0, 7, 2**32 - 1, 3], np.uint32)
    expected = np.array([package(block, int(value)) for block, value in zip(blocks, before, strict=True)], np.uint32)
    np.testing.assert_array_equal(crc32c_each(blocks, before), expected)
    for bad in range(4):
        targets = [np.full(length, 9, np.uint8) for length in lengths]
        stated = expected.copy()
        stated[bad] ^= 1
        good = copy_checked(
            blocks, before, stated, [None if number == 3 else target for number, target in enumerate(targets)]
        )
        assert good.tolist() == [number != bad for number in range(4)]
        for number, (block, target) in enumerate(zip(blocks, targets, strict=True)):
            np.testing.assert_array_equal(target, 9 if number in (bad, 3) else block)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("width", [40, 9_000], ids=["lock kept", "lock given away"])
@pytest.mark.parametrize("chosen", [None, [4, 0, 4, 19]], ids=["all", "chosen"])
def test_of_rows_whose_parts_stand_side_by_side(data, monkeypatch, width, chosen, compiled):
    if not compiled:
        monkeypatch.setattr(checksum, "_loops", lambda: None)
    rows = data[: 20 * (width + 24)].reshape(20, width + 24)
    parts = [rows[:, :16], data[7 : 7 + 20 * 3].reshape(20, 3), rows[:, 20 : 20 + width]]
    wanted = range(20) if chosen is None else chosen
    expected = [package(b"".join(part[row].tobytes() for part in parts)) for row in wanted]
    found = crc32c_rows(parts, None if chosen is None else np.array(chosen))
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, expected)
    assert not len(crc32c_rows([part[:0] for part in parts]))


def test_rows_that_are_strided_within_are_refused(data):
    with pytest.raises(ValueError, match="rows must be contiguous"):
        crc32c_rows([data[:64].reshape(4, 16)[:, ::2]])
