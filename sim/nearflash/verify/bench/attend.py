"""Bench `attend`: the selector's time, bit errors, a channel's time, flash bytes, equality, events, performance.

Two builds of eight channels for the performance take a quarter of an hour each on two cores, once; then about half an
hour in all.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any

import numpy as np

from nearflash.abi.kernel.config import attend_config
from nearflash.bench.options import Option, check_choices
from nearflash.gateware.attention.select.select import RadixSelector
from nearflash.sim.pysim.harness import transfer_cycles
from nearflash.verify.bench.attend_channel import channel_rows
from nearflash.verify.bench.attend_equality import equality_rows
from nearflash.verify.bench.attend_errors import error_rows
from nearflash.verify.bench.attend_flash import flash_rows
from nearflash.verify.bench.attend_performance import CONFIG, event_rows, performance_rows

__all__ = ["PARTS", "run", "selector_rows"]

_LANES = 4


def selector_rows(sizes: tuple[int, ...] = (128, 1024, 4096)) -> Iterator[dict[str, Any]]:
    """Cycles of the selector of the largest build from a head's last key to its last mask bit, nothing stalling."""
    keys_max = attend_config(CONFIG).selector_keys
    rng = np.random.default_rng(1)
    for size in sizes:
        rows = rng.integers(0, 1 << 16, (size // _LANES, _LANES)).tolist()
        beats = [{"keys": keys, "valid": 15, "last": index == len(rows) - 1} for index, keys in enumerate(rows)]
        inputs = {"i_command": [{"count": size // 8}], "i": beats}
        cycles = transfer_cycles(RadixSelector(keys_max), inputs, {"o": len(rows)}, timeout_cycles=4 * size + 5000)
        yield {"config": CONFIG, "part": "argtopk", "keys": size, "cycles": cycles["o"][-1] - cycles["i"][-1],
               "limit_cycles": 2 * size // _LANES + 600, "unit": "clock cycles"}  # fmt: skip


#: By name, quick ones first.
PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "selector": selector_rows,
    "errors": error_rows,
    "channel": channel_rows,
    "flash": flash_rows,
    "equality": equality_rows,
    "events": event_rows,
    "performance": performance_rows,
}


def run(
    parts: Annotated[
        Collection[str] | None, Option("Measure these parts (default: all).", many=True, choices=PARTS)
    ] = None,
) -> Iterator[dict[str, Any]]:
    """Rows of the parts of these names (None: of all). Raises CommandError for a name that is not in PARTS."""
    wanted = check_choices("parts", parts, PARTS)
    for name, rows in PARTS.items():
        if name in wanted:
            yield from rows()
