"""Sealed blocks: JSON in whole 4096-byte blocks after one line of magic, length and CRC-32.

`head -c 4096 FILE` shows the superblock of a state file as text. The checksum is CRC-32 (IEEE 802.3, zlib.crc32),
over the JSON; a block of zeros only has never been written.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.support.tables import reject_constant

__all__ = ["crc32", "is_erased", "is_sealed", "read_kind", "read_superblock", "seal", "unseal"]

_MAGIC = b"nearflash."
_HEAD_BYTES = 64
"""Of the line of magic, at most."""


def crc32(data: NDArray[np.uint8] | bytes) -> int:
    """CRC-32 (IEEE 802.3) of contiguous bytes."""
    return zlib.crc32(data if isinstance(data, bytes) else data.data)


def seal(kind: str, body: Mapping[str, Any], size_bytes: int = 0) -> NDArray[np.uint8]:
    """The block of `body` (values that JSON takes), aligned, zero-padded to whole blocks and to `size_bytes`.

    Raises StateError where the body does not fit `size_bytes` (when that is given).
    """
    text = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    sealed = _MAGIC + f"{kind} {len(text)} {crc32(text):08x}\n".encode() + text
    if size_bytes and len(sealed) > size_bytes:
        raise StateError(f"{kind} must fit {size_bytes} bytes, not {len(sealed)}; use longer extents or fewer tensors")
    block = aligned_buffer(max(size_bytes, -(-len(sealed) // BLOCK_BYTES) * BLOCK_BYTES))
    block[: len(sealed)] = np.frombuffer(sealed, dtype=np.uint8)
    return block


def is_erased(block: NDArray[np.uint8]) -> bool:
    """True where the block holds zeros only: never written."""
    return not block.any()


def is_sealed(block: NDArray[np.uint8]) -> bool:
    """True where the block carries nearflash's magic, damaged or not."""
    return block[: len(_MAGIC)].tobytes() == _MAGIC


def unseal(kind: str, block: NDArray[np.uint8]) -> dict[str, Any]:
    """The body of a sealed block. Raises StateError where magic, length or checksum do not hold."""
    head, _, after = block.tobytes().partition(b"\n")
    try:
        magic, length, checksum = head.decode("ascii").split(" ")
        text = after[: int(length)]
        if magic == _MAGIC.decode() + kind and len(text) == int(length) and crc32(text) == int(checksum, 16):
            body: dict[str, Any] = json.loads(text, parse_constant=reject_constant)
            if isinstance(body, dict):
                return body
    except (ValueError, RecursionError):
        pass
    raise StateError(f"{kind} block must carry a valid checksum, not {head[:40]!r}; it is damaged")


def read_kind(path: Path) -> str:
    """The kind of sealed block that a file begins with; empty for another one, or none that can be read."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            head, _, _ = file.read(_HEAD_BYTES).partition(b"\n")
    except OSError:
        return ""
    word = head.partition(b" ")[0].decode("ascii", "replace")
    return word.removeprefix(_MAGIC.decode()) if word.startswith(_MAGIC.decode()) else ""


def read_superblock(file: DirectFile, kind: str, version: int, of: str) -> dict[str, Any]:
    """The body of the sealed block that a file of that kind begins with; of: what it is of, for the error.

    Raises StateError where it is damaged, or of another version.
    """
    block = aligned_buffer(BLOCK_BYTES)
    try:
        file.read(0, block)
        body = unseal(kind, block)
    except StateError as error:
        raise StateError(f"{file.path} must begin with the superblock of {of}: {error}") from error
    if body.get("version") != version:
        raise StateError(f"{file.path} must have version {version}, not {body.get('version')!r}")
    return body
