"""The bench `nand`: faults of NAND under a KV store, what they cost, and that nothing durable is lost.

A row for each kind of fault, in lives that have no other; one for all kinds together with power cuts; one for lives
that end without a spare block; and controls, which must lose data: a flash that takes a failed program or erase for a
good one, one that gives up a block before it is copied, and a store that never moves what is read often.

write_amplification   bytes programmed to NAND, copies and tables of bad blocks with them, for each byte of K and V;
                      `_without`: of the same lives without a fault
lost_words            words of 16 bits, of pages that a returned flush covered, that are not read back
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, PageError, ReadOnlyError
from nearflash.bench.options import Option, check_choices
from nearflash.bench.storage.nand_life import CountedFlash, FaultKind, FaultTally, NandLife, PowerLoss

__all__ = ["run"]

FAULTS, ACTIONS = 10_000, 100
SPARES, FEW_SPARES = 24, 2
PARTS = (*FaultKind, "together", "no-spare", "controls")
_GROUPS = len(FaultKind) + 1
"""Rows that share the faults: each kind, and all together."""
_NO_SPARE_LIVES, _CONTROL_LIVES = 10, 100
_WEAR_OUT = Counter(dict.fromkeys((FaultKind.PROGRAM, FaultKind.ERASE, FaultKind.GROWN), 1 << 30))


def run(
    faults: Annotated[int, Option("Inject so many faults in all.", int, metavar="N")] = FAULTS,
    actions: Annotated[int, Option("Calls of a store's life.", int, metavar="N")] = ACTIONS,
    seed: Annotated[int, Option("The first life's seed; each life has its own.", int, metavar="N")] = 1,
    parts: Annotated[
        Collection[str] | None, Option("Run these parts (default: all).", many=True, choices=PARTS)
    ] = None,
) -> Iterator[dict[str, Any]]:
    """A row for each part; `mismatches` counts words lost, retired blocks used again, and controls that lose nothing.

    Raises CommandError.
    """
    for name, value in (("faults", faults), ("actions", actions)):
        if value < 1:
            raise CommandError(f"{name} must be at least 1, not {value}")
    for part in check_choices("parts", parts, PARTS):
        if part == "controls":
            yield from _controls(actions, seed)
        elif part == "no-spare":
            yield _run_out(actions, seed)
        else:
            kinds = tuple(FaultKind) if part == "together" else (FaultKind(part),)
            share = (faults + _GROUPS - 1 - PARTS.index(part)) // _GROUPS
            yield _row(part, _inject(kinds, share, actions, seed, loses_power=part == "together"))


@dataclass
class _Lives:
    """Sums over lives."""

    count: int = 0
    injected: int = 0
    retired: int = 0
    moved_bytes: int = 0
    lost_words: int = 0
    reused: int = 0
    cuts: int = 0
    cuts_in_moves: int = 0
    host_bytes: int = 0
    programmed_bytes: int = 0
    twin_host_bytes: int = 0
    twin_programmed_bytes: int = 0
    kinds: Counter[FaultKind] = field(default_factory=Counter)

    def add(self, life: NandLife) -> None:
        """Count a life that has ended."""
        tally: FaultTally = life.injector.tally
        self.count += 1
        self.kinds += tally.injected
        self.injected += tally.injected.total()
        self.retired += tally.retired.total()
        self.moved_bytes += (tally.moved_pages.total() + life.refreshed_pages) * life.page_bytes
        self.cuts, self.cuts_in_moves = self.cuts + tally.cuts, self.cuts_in_moves + tally.cuts_in_moves
        self.host_bytes += life.host_bytes
        self.programmed_bytes += life.programmed_bytes


def _inject(kinds: Collection[FaultKind], faults: int, actions: int, seed: int, *, loses_power: bool) -> _Lives:
    """Lives until so many faults have happened, as many of each kind."""
    lives, left = _Lives(), Counter({kind: (faults + at) // len(kinds) for at, kind in enumerate(kinds)})
    while left.total():
        life_seed = seed + lives.count
        life = NandLife(life_seed, left, spare_blocks=SPARES, loses_power=loses_power)
        lives.lost_words += _live(life, actions)
        twin = NandLife(life_seed, None, spare_blocks=SPARES)
        _live(twin, life.actions)
        lives.twin_host_bytes += twin.host_bytes
        lives.twin_programmed_bytes += twin.programmed_bytes
        lives.add(life)
        lives.reused += life.count_reused()
        left = left - life.injector.tally.injected
    return lives


def _live(life: NandLife, actions: int) -> int:
    """Act until the end, or a power cut; words lost."""
    try:
        for _ in range(actions):
            life.act()
    except PowerLoss:
        return life.count_lost_on_nand()
    except PageError as error:  # a store cannot go on where a page that it must move is lost
        return len(error.pages) * life.page_bytes // 2
    return life.count_lost() + life.count_lost_on_nand()


def _row(part: str, lives: _Lives) -> dict[str, Any]:
    kinds = {"injected_by_kind": {str(kind): count for kind, count in lives.kinds.items()}}
    return {
        "part": str(part), "lives": lives.count, "injected": lives.injected, "blocks_retired": lives.retired,
        **(kinds if part == "together" else {}),
        "moved_bytes": lives.moved_bytes, "host_bytes": lives.host_bytes, "programmed_bytes": lives.programmed_bytes,
        "write_amplification": lives.programmed_bytes / max(lives.host_bytes, 1),
        "write_amplification_without": lives.twin_programmed_bytes / max(lives.twin_host_bytes, 1),
        "power_cuts": lives.cuts, "power_cuts_in_moves": lives.cuts_in_moves, "lost_words": lives.lost_words,
        "retired_blocks_reused": lives.reused, "mismatches": lives.lost_words + lives.reused,
    }  # fmt: skip


def _run_out(actions: int, seed: int) -> dict[str, Any]:
    """Lives with two spares on each LUN, which end read only: all that was durable is still there."""
    lives, ended = _Lives(), 0
    for number in range(_NO_SPARE_LIVES):
        life = NandLife(seed + number, _WEAR_OUT, spare_blocks=FEW_SPARES)
        try:
            for _ in range(actions):
                life.act()
        except ReadOnlyError:
            ended += 1
        lives.lost_words += life.count_lost() + life.count_lost_on_nand()
        lives.add(life)
    return {"part": "no-spare", "lives": lives.count, "read_only_ends": ended, "injected": lives.injected,
            "blocks_retired": lives.retired, "lost_words": lives.lost_words,
            "mismatches": lives.lost_words + (not ended)}  # fmt: skip


def _controls(actions: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of stores that do less, which must lose something."""
    often = 1 << 60
    for name, kinds, options in (
        ("control-failures-ignored", (FaultKind.PROGRAM, FaultKind.GROWN), {"flash": _Ignoring}),
        ("control-erased-before-copied", (FaultKind.PROGRAM,), {"flash": _Hasty, "loses_power": True}),
        ("control-never-refreshed", (FaultKind.DISTURB,), {"read_limit": often}),
    ):
        room, lost, injected = Counter(dict.fromkeys(kinds, 1 << 30)), 0, 0
        lives = 0
        while not lost and lives < _CONTROL_LIVES:
            life = NandLife(seed + lives, room, spare_blocks=SPARES, **options)
            lost, lives = lost + _live(life, actions), lives + 1
            injected += life.injector.tally.injected.total()
        yield {"part": name, "lives": lives, "injected": injected, "lost_words": lost, "mismatches": int(not lost)}


class _Ignoring(CountedFlash):
    """Takes a failed program or erase for a good one."""

    def _try_program(self, *arguments: Any) -> NDArray[np.bool_]:
        return np.zeros_like(super()._try_program(*arguments))

    def _try_erase(self, *arguments: Any) -> NDArray[np.bool_]:
        return np.zeros_like(super()._try_erase(*arguments))


class _Hasty(CountedFlash):
    """Reads a block that failed, and erases it before its pages are anywhere else."""

    def _read_kept(self, block: int) -> Any:
        kept = super()._read_kept(block)
        self._try_erase(self._map.places[[block]])
        return kept
