"""Codewords as they lie in memory (sealed) and on NAND (raw), and what a checker says about them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.attention.codeword import (
    AUX_BYTES,
    CODEWORD_BYTES,
    MESSAGE_BYTES,
    PARITY_BYTES,
    RAW_BYTES,
    SEALED_BYTES,
    PageKind,
    PageTag,
)
from nearflash.model.coding.crc import crc32c
from nearflash.model.nand.bch.corrector import UNCORRECTABLE, correct
from nearflash.model.nand.bch.encoder import parity
from nearflash.model.nand.scramble import scrambling

__all__ = ["Checked", "check", "decode", "raw_codewords", "seal"]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Checked:
    """N codewords and what was found out about them.

    Data and aux of codewords that are uncorrectable or misdirected mean nothing.
    """

    data: Bytes
    """(N, 512)."""
    aux: Bytes
    """(N, 8)."""
    uncorrectable: NDArray[np.bool_]
    misdirected: NDArray[np.bool_]
    errors: NDArray[np.int64]
    """Bits corrected; -1 where uncorrectable."""


def _crc(page_tag: PageTag, page_index: ArrayLike, kind: PageKind, first: int, covered: Bytes) -> Bytes:
    """(..., N, 4): CRC32C over page tag and aux ‖ data; a page's codewords are numbered from `first`."""
    places = covered.shape[:-1]
    indices = np.broadcast_to(np.expand_dims(page_index, -1), places)
    numbers = np.broadcast_to(first + np.arange(places[-1]), places)
    blocks = b"".join(page_tag.block(int(i), kind, int(n)) for i, n in zip(indices.flat, numbers.flat, strict=True))
    rows = np.concatenate([np.frombuffer(blocks, np.uint8).reshape(*places, 16), covered], axis=-1)
    return crc32c(rows).astype("<u4")[..., None].view(np.uint8)


def seal(
    page_tag: PageTag, page_index: ArrayLike, kind: PageKind, data: Bytes, aux: Bytes | None = None, *, first: int = 0
) -> Bytes:
    """(N, 528): sealed codewords of `data` (N, 512) and `aux` (N, 8; None: zeros), numbered from `first`.

    Of a separate token group K's page has `first` 0, V's page the number of codewords of a page. Many pages at once:
    page_index (P,), arrays (P, N, …).
    """
    sealed = np.zeros((*data.shape[:-1], SEALED_BYTES), np.uint8)
    sealed[..., :AUX_BYTES] = 0 if aux is None else aux
    sealed[..., AUX_BYTES : AUX_BYTES + CODEWORD_BYTES] = data
    covered = sealed[..., : MESSAGE_BYTES - 4]
    sealed[..., MESSAGE_BYTES - 4 : MESSAGE_BYTES] = _crc(page_tag, page_index, kind, first, covered)
    return sealed


def raw_codewords(sealed: Bytes, row: ArrayLike, lun: ArrayLike) -> Bytes:
    """(N, 552): sealed codewords as on NAND, at places 0, 1, … of the page at (lun, row).

    Many pages at once: row and lun (P,), sealed (P, N, 528).
    """
    places = sealed.shape[:-1]
    message = sealed.reshape(-1, SEALED_BYTES)[:, :MESSAGE_BYTES]
    padding = np.zeros((len(message), RAW_BYTES - MESSAGE_BYTES - PARITY_BYTES), np.uint8)
    codewords = np.hstack([message, parity(message), padding])
    rows, luns = (np.broadcast_to(np.expand_dims(x, -1), places).reshape(-1) for x in (row, lun))
    numbers = np.broadcast_to(np.arange(places[-1]), places).reshape(-1)
    return (codewords ^ scrambling(rows, luns, numbers)).reshape(*places, RAW_BYTES)


def check(sealed: Bytes, page_tag: PageTag, page_index: ArrayLike, kind: PageKind, *, first: int = 0) -> Checked:
    """Check a sealed page from memory: codewords whose CRC is wrong are misdirected.

    Many pages at once: page_index (P,), sealed and the result (P, N, …).
    """
    return _check_kind(sealed, page_tag, page_index, kind, first, np.zeros(sealed.shape[:-1], np.int64))


def decode(
    raw: Bytes,
    row: int,
    lun: int,
    page_tag: PageTag,
    page_index: int,
    kind: PageKind,
    *,
    place: int = 0,
    first: int = 0,
) -> Checked:
    """Decode what raw codewords from the places `place`, … of the page at (lun, row) hold.

    A wrong CRC makes a codeword misdirected where no bit was wrong, else uncorrectable.
    """
    codewords = raw ^ scrambling(row, lun, place + np.arange(len(raw)))
    corrected, errors = correct(codewords[:, : MESSAGE_BYTES + PARITY_BYTES])
    return _check_kind(corrected, page_tag, page_index, kind, first, errors)


def _check_kind(
    codewords: Bytes, page_tag: PageTag, page_index: ArrayLike, kind: PageKind, first: int, errors: NDArray[np.int64]
) -> Checked:
    covered, crc = codewords[..., : MESSAGE_BYTES - 4], codewords[..., MESSAGE_BYTES - 4 : MESSAGE_BYTES]
    wrong = (_crc(page_tag, page_index, kind, first, covered) != crc).any(axis=-1)
    uncorrectable = (errors == UNCORRECTABLE) | wrong & (errors > 0)
    return Checked(
        data=covered[..., AUX_BYTES:],
        aux=covered[..., :AUX_BYTES],
        uncorrectable=uncorrectable,
        misdirected=wrong & (errors == 0),
        errors=np.where(uncorrectable, UNCORRECTABLE, errors),
    )
