"""Sealed pages of random content."""

from collections.abc import Callable

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.model.nand.codeword import seal


@pytest.fixture(scope="session")
def make_sealed() -> Callable[..., np.ndarray]:
    """make_sealed(page_tag, index, kind, codewords, second, seed) -> (codewords, 528) bytes."""

    def make(page_tag: PageTag, index: int, kind: PageKind, codewords: int, second: bool, seed: int) -> np.ndarray:
        content = np.random.default_rng(seed).integers(0, 256, (codewords, 520), np.uint8)
        return seal(page_tag, index, kind, content[:, 8:], content[:, :8], first=codewords * second)

    return make
