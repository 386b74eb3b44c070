"""Vectors of the unpacker: counts of no, of few and of many fields, in words that go on behind them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.gateware.weights.unpack import Unpack
from nearflash.model.weights.fields import join_fields
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import ObservedStreams

__all__ = ["unpacker", "vectors"]

_WIDTH, _PORT_BITS, _LANE_BITS, _COUNT_BITS = 4, 64, 16, 8
_SIZES_BITS = (4, 8, 16)
_COUNTS = 100


def unpacker() -> ObservedStreams:
    """The smallest one of three sizes."""
    return ObservedStreams(Unpack(_WIDTH, _PORT_BITS, _SIZES_BITS, lane_bits=_LANE_BITS, count_bits=_COUNT_BITS))


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Fields of one size."""
    size = int(rng.integers(len(_SIZES_BITS)))
    bits, counts, text, groups = _SIZES_BITS[size], [], b"", list[int]()
    for _ in range(_COUNTS):
        count = int(rng.integers(1 << int(rng.integers(_COUNT_BITS + 1))))
        fields = rng.integers(0, 1 << bits, -(-count * bits // _PORT_BITS) * _PORT_BITS // bits)
        lanes = np.pad(fields[:count], (0, -count % _WIDTH)).reshape(-1, _WIDTH)
        counts.append(count)
        text += join_fields(fields, bits)
        for index, group in enumerate(lanes.tolist()):
            data = sum(field << _LANE_BITS * lane for lane, field in enumerate(group))
            groups.append(data | (index == len(lanes) - 1) << _WIDTH * _LANE_BITS)
    inputs = {"i_count": np.array(counts, np.uint8), "i": np.frombuffer(text, "<u8"), "size": np.array(size)}
    return inputs, {"o": words_from_integers(groups, _WIDTH * _LANE_BITS + 1)}
