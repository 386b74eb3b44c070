"""Vectors of the packer: groups of any lanes, whole or their low bytes; the last word is not filled."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.gateware.weights.pack import Pack
from nearflash.verify.mutants.observed import ObservedStreams

__all__ = ["packer", "vectors"]

_WIDTH, _PORT_BITS = 4, 128
_GROUPS = 301


def packer() -> ObservedStreams:
    """Of two or four groups a word."""
    return ObservedStreams(Pack(_WIDTH, _PORT_BITS))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Groups of one kind."""
    lanes, narrow = rng.integers(0, 1 << 16, (_GROUPS, _WIDTH), np.uint16), int(rng.integers(2))
    text = (lanes & 0xFF).astype(np.uint8).tobytes() if narrow else lanes.tobytes()
    words = np.frombuffer(text[: len(text) // 16 * 16], "<u4").reshape(-1, _PORT_BITS // 32)
    return {"i": lanes.view("<u8")[:, 0], "narrow": np.array(narrow)}, {"o": words}
