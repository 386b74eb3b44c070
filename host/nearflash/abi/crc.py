"""CRC32C of bytes, one at a time: for headers and references. Bulk data take a library or the gateware.

Source: RFC 3720, 12.1 (Castagnoli).
"""

__all__ = ["CRC_POLYNOMIAL", "CRC_RESIDUE", "CRC_TABLE", "crc32c"]

CRC_POLYNOMIAL = 0x82F63B78
"""CRC32C (Castagnoli): bit 31 - k is the coefficient of x^k, x^32 left out."""
CRC_RESIDUE = 0x48674BC7
"""CRC32C of any message with its own CRC32C (little endian) behind it."""


def _row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (CRC_POLYNOMIAL if value & 1 else 0)
    return value


CRC_TABLE = tuple(map(_row, range(256)))
"""The register after a byte, by that byte, where it was zero before."""


def crc32c(data: bytes, crc: int = 0) -> int:
    """CRC32C of `data` behind a message whose CRC32C is `crc`."""
    register = crc ^ 0xFFFF_FFFF
    for byte in data:
        register = register >> 8 ^ CRC_TABLE[(register ^ byte) & 0xFF]
    return register ^ 0xFFFF_FFFF
