from nearflash.abi.crc import CRC_RESIDUE, crc32c


def test_check_value_of_the_standard():
    """RFC 3720, B.4: 32 zeros, 32 ones, ascending bytes; and the usual check value."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_a_message_in_parts():
    assert crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")


def test_residue():
    for message in (b"", b"1", b"nearflash"):
        assert crc32c(message + crc32c(message).to_bytes(4, "little")) == CRC_RESIDUE
