"""Fingerprints of tensors' bytes, for readers that have no torch: nearflash.training.step.fingerprint defines them."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEYS", "MODULUS", "RUN", "fingerprint_bytes"]

MODULUS = 1 << 64
RUN = 1 << 10
"""Words that share a factor of the fingerprint."""
KEYS = np.random.Generator(np.random.PCG64(0x6E66)).integers(0, 1 << 32, RUN, dtype=np.uint32) | np.uint32(1)


def fingerprint_bytes(content: NDArray[np.uint8]) -> int:
    """Fingerprint of a whole tensor's bytes (n,): any of them changed alone gives another one."""
    total = 0
    for start in range(0, content.size, RUN * 4 << 10):
        piece = content[start : start + (RUN * 4 << 10)]
        runs = np.zeros((-(-piece.size // (RUN * 4)), RUN), "<u4")
        runs.view(np.uint8).reshape(-1)[: piece.size] = piece
        factors = 2 * (np.arange(len(runs), dtype=np.uint64) + np.uint64(start // (RUN * 4))) + np.uint64(1)
        total += int(((runs.astype(np.uint64) * KEYS).sum(axis=1, dtype=np.uint64) * factors).sum(dtype=np.uint64))
    return total % MODULUS
