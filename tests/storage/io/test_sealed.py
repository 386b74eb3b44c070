"""Sealed blocks: what goes in comes out, and any flipped bit is seen."""

import numpy as np
import pytest

from nearflash.abi.errors import StateError
from nearflash.storage.io.sealed import crc32, is_erased, is_sealed, seal, unseal

BODY = {"step": 7, "name": "x" * 40}


def test_round_trip():
    block = seal("table", BODY)
    assert block.nbytes == 4096 and is_sealed(block) and not is_erased(block)
    assert unseal("table", block) == BODY
    assert block.tobytes().startswith(b"nearflash.table ")


def test_checksum_is_the_standard_one():
    assert crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC


def test_every_flipped_bit_is_seen():
    block = seal("table", {"step": 7})
    for bit in range(8 * len(block.tobytes().rstrip(b"\0"))):
        damaged = block.copy()
        damaged[bit // 8] ^= 1 << (bit % 8)
        # Spellings of the same checksum (upper case, a leading "+") are no damage.
        try:
            assert unseal("table", damaged) == {"step": 7}
        except StateError as error:
            assert "valid checksum" in str(error)


def test_another_kind_is_refused():
    with pytest.raises(StateError, match="superblock block must carry a valid checksum"):
        unseal("superblock", seal("table", BODY))
    with pytest.raises(StateError):
        unseal("table", np.zeros(4096, np.uint8))


def test_a_body_too_long_is_refused():
    with pytest.raises(StateError, match="table must fit 4096 bytes"):
        seal("table", {"x": "y" * 5000}, 4096)
    assert seal("manifest", {"x": "y" * 5000}).nbytes == 8192
