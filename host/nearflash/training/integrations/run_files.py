"""State files of ranks: those of one run, one on each rank as they were, or none; before any of them is opened.

Each rank's store holds in its metadata whose share of which run it is, from its first step on.
"""

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError, StateError
from nearflash.storage import StateStore
from nearflash.storage.state.ranks import RANKS_KEY, ShardedState
from nearflash.support.files import give_name
from nearflash.training.integrations.process_group import Ranks
from nearflash.training.step.settings import StepSettings

__all__ = ["Share", "agree_on_files", "reshard_on_load"]


_NEW = ".resharded"
"""Ending of a rank's file for another number of ranks until all have theirs."""


@dataclass(frozen=True)
class Share:
    """Which part of which run a rank has."""

    run: int
    """Drawn at its beginning, the same on all ranks; 0: unknown."""
    rank: int
    of: int
    """Ranks of the run."""

    @classmethod
    def split(cls, metadata: Mapping[str, Any]) -> tuple["Share", dict[str, Any]]:
        """Split what the metadata of a store say of its share, and the rest of them, which is the training script's."""
        stored = metadata.get(RANKS_KEY, {"run": 0, "rank": 0, "of": 0})
        return cls(**stored), {key: value for key, value in metadata.items() if key != RANKS_KEY}

    def join(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Inverse of `split`."""
        return {**metadata, RANKS_KEY: asdict(self)}


def agree_on_files(ranks: Ranks, options: Mapping[str, Any]) -> tuple[Share, list[Path]]:
    """This rank's share, and the files that it will make; options: of its optimizer.

    Raises StateError, on all ranks, for files that are there on some ranks only, or not of one run; nothing was opened
    or made then.
    """
    paths = ranks.together(lambda: _paths(options), "opening")
    resume, missing = options.get("resume", False), [path for path in paths if not path.exists()]
    there = [rank for rank, (some,) in enumerate(ranks.gather([len(missing) < len(paths)])) if some]
    if there and (not resume or (resume == "auto" and len(there) < ranks.count)):
        rule = "must exist on every rank or on none" if resume else "must not exist yet"
        raise StateError(
            f"state files {rule}, and do exist on ranks {there} (here: {paths[0]}): pass resume=True to resume from "
            "those of all ranks, or give other paths"
        )
    direct = bool(options.get("direct", True))
    share, steps = ranks.together(lambda: _read_share(paths, direct), "opening")
    rows = ranks.gather([share.run, share.rank, share.of, steps])
    _check_one_run([(Share(*row[:3]), row[3]) for row in rows])
    run = next((row[0] for row in rows if row[0]), 0) or ranks.gather([1 + secrets.randbits(62)])[0][0]
    return Share(run, ranks.rank, ranks.count), missing


def reshard_on_load(ranks: Ranks, path: Path, entries: Callable[[ShardedState], list[Any]], direct: bool) -> None:
    """Make `path`, this rank's file, of files of another number of ranks beside it, where there are some; else nothing.

    entries: of the new manifest. One rank writes after another, as files are locked. The old files are replaced when
    all new ones are complete, and a crash in between is made good by the next call. Raises StateError on all ranks.
    """

    def look(turn: int) -> list[Path]:
        return _find_set(path.parent, ranks.count, direct) if turn == ranks.rank else []

    new = path.with_name(path.name + _NEW)
    share, _ = ranks.together(lambda: _read_share([path], direct), "opening")
    shares = [Share(*row) for row in ranks.gather([share.run, share.rank, share.of])]
    if shares[0].run and shares == [Share(shares[0].run, rank, ranks.count) for rank in range(ranks.count)]:
        ranks.together(lambda: new.unlink(missing_ok=True), "opening")  # of a resharding that did not end
        return
    found: list[Path] = []
    for turn in range(ranks.count):
        if mine := ranks.together(partial(look, turn), "opening"):
            found = mine
    sizes = [size for (size,) in ranks.gather([len(found)])]
    if len({*sizes}) > 1:
        raise StateError(
            f"ranks must see the files of one run, and see those of {sizes} ranks (here in {path.parent}): to change "
            "their number give a folder that all ranks share, or copy the files to each"
        )
    if not found:
        return

    def write() -> None:
        new.unlink(missing_ok=True)
        with ShardedState.open(found, direct=direct) as state:
            state.write(new, entries(state), ranks.rank, ranks.count)

    if len(found) != ranks.count:
        for turn in range(ranks.count):
            ranks.together(write if turn == ranks.rank else lambda: None, "resharding")
    ranks.together(lambda: give_name(new, path) if new.exists() else None, "resharding")
    later = [path.with_name(f"rank{rank}.state") for rank in range(ranks.count, len(found))]
    ranks.together(lambda: _remove(later), "resharding")


def _find_set(folder: Path, count: int, direct: bool) -> list[Path]:
    """The files of all ranks of a run in a folder, by rank: of the newest step, those of `count` ranks first."""
    sets: dict[tuple[int, int], dict[int, Path]] = {}
    steps: dict[tuple[int, int], int] = {}
    for path in (*sorted(folder.glob("rank*.state")), *sorted(folder.glob(f"rank*.state{_NEW}"))):
        share, at = _read_share([path], direct)
        if share.run:
            key = share.run, share.of
            sets.setdefault(key, {}).setdefault(share.rank, path)
            steps[key] = max(at, steps.get(key, 0))
    whole = [key for key, files in sets.items() if files.keys() == {*range(key[1])}]
    best = max(whole, key=lambda key: (steps[key], key[1] == count), default=None)
    return [] if best is None else [sets[best][rank] for rank in range(best[1])]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _check_one_run(found: Sequence[tuple[Share, int]]) -> None:
    """Raise StateError where known shares are not of one run, in order. found: of each rank, with its steps."""
    run = next((share.run for share, _ in found if share.run), 0)
    for rank, (share, steps) in enumerate(found):
        if not run or not (share.run or steps):
            continue  # of an earlier version, or no step was committed yet
        if share.run and share.of != len(found):
            raise StateError(
                f"state files must be opened by as many ranks as wrote them, {share.of}, not {len(found)}: to change "
                f"the number, hand full_state_dict() of {share.of} ranks to load_full_state_dict()"
            )
        if (share.run, share.rank) != (run, rank):
            whose = f"rank {share.rank}'s" + ("" if share.run == run else " of another run")
            raise StateError(
                f"state files must be of one run, each on its own rank, but that of rank {rank} is {whose}: give each "
                "rank its own path"
            )


def _paths(options: Mapping[str, Any]) -> tuple[Path, ...]:
    if "path" not in options:
        return ()  # the optimizer will miss it
    return StepSettings(path=options["path"], device=options.get("device", "host")).paths


def _read_share(paths: Sequence[Path], direct: bool) -> tuple[Share, int]:
    """Share and steps of the state on `paths`; unknown and 0 where there is none, or it cannot be opened."""
    if paths and all(path.exists() for path in paths):
        with warnings.catch_warnings(), suppress(NearflashError):  # the optimizer reports both
            warnings.simplefilter("ignore")
            with StateStore.open(paths, direct=direct) as store:
                return Share.split(store.metadata)[0], store.steps
    return Share(0, 0, 0), 0
