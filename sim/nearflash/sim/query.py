"""Query rows as the attend kernel broadcasts them, from plain q."""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.model.num.product import operand

__all__ = ["query_rows"]

_LANES = 4


def query_rows(q: NDArray[np.float16], chosen: Collection[int], heads_per_beat: int, base: int) -> list[dict[str, Any]]:
    """What `query_write` of the gateware holds, row by row, of q (g, d); `chosen` channels count as selected."""
    group, dim = q.shape
    lanes = -(-group // heads_per_beat) * heads_per_beat
    operands = np.zeros((lanes, dim), np.int64)
    operands[:group] = operand(q)
    rows: list[dict[str, Any]] = []
    for first in range(0, lanes, heads_per_beat):
        for start in range(0, dim, _LANES):
            part = operands[first : first + heads_per_beat, start : start + _LANES]
            selected = sum(1 << lane for lane in range(_LANES) if start + lane in chosen)
            values = [[_fields(int(word)) for word in head] for head in part]
            rows.append({"address": base + len(rows), "values": values, "selected": selected})
    return rows


def _fields(word: int) -> dict[str, int]:
    return {"value": word & 0x3FFF, "places": word >> 14 & 7, "negative": word >> 17}
