"""Pages in arrays: whose they are, their bytes, and their checksums.

A page's key is the page tag of its first codeword (docs/contracts/attention.md, 2), so that keys are compared, kept and
covered by checksums as they are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearflash.abi.attention.codeword import AUX_BYTES, CODEWORD_BYTES, HEADER_MAGIC, SEALED_BYTES, PageKind
from nearflash.abi.attention.pages import IndexFormat
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import crc32c_rows
from nearflash.storage.io.direct import aligned_buffer
from nearflash.storage.io.reuse import reuse_buffer

__all__ = [
    "PAGE_KEY",
    "PageData",
    "PageKeys",
    "PageWrites",
    "describe",
    "header_keys",
    "page_array",
    "page_checksums",
    "page_headers",
    "page_keys",
    "page_space",
    "seal_codewords",
    "unseal_pages",
]

PAGE_KEY = np.dtype(
    {
        "names": ["sequence", "layer", "head", "index", "kind", "first", "zero"],
        "formats": ["<u4", "<u2", "<u2", "<u4", "u1", "u1", "<u2"],
    }
)
"""Page tag of a page: page_tag, page index, kind (PageKind), number of the first codeword (of V's page of a separate
KV page group: the codewords of a page; else 0), zero."""
PageKeys = NDArray[np.void]
Bytes = NDArray[np.uint8]
_HEADER_WORDS = 8


@dataclass(frozen=True)
class PageData:
    """The content of p pages."""

    data: Bytes
    """(p, page_bytes)."""
    aux: Bytes
    """(p, codewords, 8)."""


@dataclass(frozen=True)
class PageWrites:
    """p pages to be programmed."""

    keys: PageKeys
    """(p,), of dtype PAGE_KEY."""
    data: Bytes
    """(p, page_bytes)."""
    aux: Bytes
    """(p, codewords, 8)."""


def page_keys(
    sequence: ArrayLike, layer: ArrayLike, head: ArrayLike, index: ArrayLike, kind: PageKind, first: ArrayLike = 0
) -> PageKeys:
    """Keys of pages, of the shape that the arguments broadcast to."""
    parts = {"sequence": sequence, "layer": layer, "head": head, "index": index, "first": first}
    keys = np.zeros(np.broadcast(*parts.values()).shape, PAGE_KEY)
    for name, part in parts.items():
        keys[name] = part
    keys["kind"] = kind
    return keys


def describe(key: np.void) -> str:
    """A key in words."""
    kind = PageKind(key["kind"]).name.lower() if key["kind"] < len(PageKind) else f"kind {key['kind']}"
    part = " (V)" if key["first"] else ""
    return f"sequence {key['sequence']}, layer {key['layer']}, head {key['head']}, {kind} page {key['index']}{part}"


def page_array(pages: int, page_bytes: int) -> Bytes:
    """Zeroed, (pages, page_bytes), aligned for direct I/O."""
    size = pages * page_bytes
    return aligned_buffer(max(-(-size // BLOCK_BYTES), 1) * BLOCK_BYTES)[:size].reshape(pages, page_bytes)


def page_space(pages: int, page_bytes: int) -> Bytes:
    """As `page_array`, with any content: memory that was in use before is had without page faults."""
    return reuse_buffer(pages * page_bytes).reshape(pages, page_bytes)


def page_headers(keys: PageKeys, page_bytes: int, tokens: int, form: IndexFormat) -> Bytes:
    """Header word of each codeword, (p, codewords, 4), of pages of `tokens` tokens."""
    words = np.zeros((len(keys), _HEADER_WORDS), "<u4")
    layout = int(form) << 8 | (page_bytes.bit_length() - 1) << 16
    words[:, 0], words[:, 1] = HEADER_MAGIC, keys["sequence"]
    words[:, 2] = keys["layer"] | keys["head"].astype("<u4") << 16
    words[:, 3], words[:, 4], words[:, 6] = keys["kind"] | np.uint32(layout), keys["index"], tokens
    codewords = page_bytes // CODEWORD_BYTES
    return np.tile(words, (1, codewords // _HEADER_WORDS)).view(np.uint8).reshape(len(keys), codewords, 4)


def header_keys(aux: Bytes) -> tuple[PageKeys, NDArray[np.bool_]]:
    """Keys as the headers in aux (p, codewords, 8) give them, `first` 0, and which headers carry the magic."""
    words = np.ascontiguousarray(aux[:, :_HEADER_WORDS, 4:]).view("<u4")[..., 0]
    keys = np.zeros(len(aux), PAGE_KEY)
    keys["sequence"], keys["layer"], keys["head"] = words[:, 1], words[:, 2] & 0xFFFF, words[:, 2] >> 16
    keys["index"], keys["kind"] = words[:, 4], words[:, 3] & 0xFF
    return keys, words[:, 0] == HEADER_MAGIC


def page_checksums(
    keys: PageKeys, aux: Bytes, data: Bytes, chosen: NDArray[np.int64] | None = None
) -> NDArray[np.uint32]:
    """CRC32C over key ‖ aux ‖ data of each page, (p,); or of the `chosen` ones (n,)."""
    page_tags = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), PAGE_KEY.itemsize)
    return crc32c_rows([page_tags, aux.reshape(len(keys), aux.shape[1] * AUX_BYTES), data], chosen)


def unseal_pages(sealed: Bytes, expected: PageKeys) -> tuple[PageData, NDArray[np.bool_]]:
    """Data and aux of pages (p, codewords, 528), and which are valid pages of their expected keys."""
    pages, codewords = sealed.shape[:2]
    data, end = page_array(pages, codewords * CODEWORD_BYTES), AUX_BYTES + CODEWORD_BYTES
    data.reshape(pages, codewords, CODEWORD_BYTES)[:] = sealed[..., AUX_BYTES:end]
    aux = np.ascontiguousarray(sealed[..., :AUX_BYTES])
    again = seal_codewords(PageWrites(expected, data, aux))
    return PageData(data, aux), (again == sealed).all(axis=(1, 2))


def seal_codewords(batch: PageWrites) -> Bytes:
    """The pages as they lie in memory: (p, codewords, 528), each codeword with its own CRC32C."""
    pages, codewords = batch.aux.shape[:2]
    covered = np.zeros((pages, codewords, PAGE_KEY.itemsize + SEALED_BYTES), np.uint8)
    keys = np.repeat(batch.keys[:, None], codewords, axis=1)
    keys["first"] += np.arange(codewords, dtype=np.uint8)
    covered[..., : PAGE_KEY.itemsize] = keys.view(np.uint8).reshape(pages, codewords, PAGE_KEY.itemsize)
    sealed = covered[..., PAGE_KEY.itemsize :]
    end = AUX_BYTES + CODEWORD_BYTES
    sealed[..., :AUX_BYTES] = batch.aux
    sealed[..., AUX_BYTES:end] = batch.data.reshape(pages, codewords, CODEWORD_BYTES)
    rows = covered.reshape(pages * codewords, covered.shape[2])[:, : PAGE_KEY.itemsize + end]
    checksums = crc32c_rows([rows]).astype("<u4", copy=False)
    sealed[..., end : end + 4] = checksums.reshape(pages, codewords, 1).view(np.uint8)
    return sealed
