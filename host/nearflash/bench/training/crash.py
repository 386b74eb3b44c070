"""The bench `crash`: power lost at every point, training killed, and a fault at every call of every operation."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import MasterFormat
from nearflash.bench.options import Option, check_choices
from nearflash.bench.storage.block_crashes import block_crash_points
from nearflash.bench.storage.block_kills import kill_writers
from nearflash.bench.storage.crashes import Crashes, crash_points
from nearflash.bench.storage.delta_crashes import delta_crash_points
from nearflash.bench.storage.faults import Faults, inject
from nearflash.bench.storage.history import FORMATS, MANIFEST
from nearflash.bench.storage.kept_crashes import KeptCrashes, find_kept_crash_points
from nearflash.bench.storage.kv_crashes import kv_crash_points
from nearflash.bench.storage.rank_crashes import rank_crash_points

__all__ = ["run"]

PARTS = ("crashes", "kv", "blocks", "kills", "ranks", "faults")
FILES = (1, 2)
"""Files of a state."""
STEPS = 3
SPLIT_STEPS = 9
"""Of a split master: until the room for changes of its weights is full, and further."""
IMAGES = 100
"""Images at each point of a history, about, unless others are asked for."""
DELTA_STEPS = 12
KV_ACTIONS, KV_IMAGES, KV_SEEDS = 120, 6, (1, 2, 3)
"""Calls of a KV store's life, images at each point of it, lives."""
KEPT_ACTIONS, KEPT_IMAGES, KEPT_SEEDS, CONTROL_SEED = 24, 2, (1, 2, 3, 4, 5), 1
"""Of one whose sequences outlast it, with turns, forks and crops; the control's life is one of them."""
BLOCK_ACTIONS, BLOCK_IMAGES, BLOCK_SEEDS, BLOCK_KILLS = 75, 4, tuple(range(1, 9)), 40
"""Calls of a block store's life, images at each point of it, lives; kills of a process that writes one."""
KILLS = 30
"""Of training on a state of one file, and as many on one of two."""
RANKS, RANK_KILLS = (2, 3), 20
"""Of sharded training, and how often one of them is killed."""
TIMEOUT_S = 600.0
"""For those: the first take about 20 s on two idle cores, those of ranks 2 minutes."""


def run(
    parts: Annotated[
        Collection[str] | None, Option("Run these parts (default: all).", many=True, choices=PARTS)
    ] = None,
    images: Annotated[
        int, Option("Try about so many images of the files at each moment of their lives.", int, metavar="N")
    ] = IMAGES,
) -> Iterator[dict[str, Any]]:
    """One row: how much was tried, and how much of it went wrong; what went wrong goes to standard error.

    Raises CommandError.
    """
    if images < 1:
        raise CommandError(f"images must be at least 1, not {images}")
    wanted = check_choices("parts", parts, PARTS)
    row: dict[str, Any] = {}
    bad: list[str] = []
    for part in wanted:
        with tempfile.TemporaryDirectory(prefix="nearflash-crash-") as folder:
            figures, wrong = _PARTS[part](Path(folder), images)
        row, bad = {**row, **figures}, [*bad, *wrong]
    for wrong_one in bad[:100]:
        print(wrong_one, file=sys.stderr)
    yield {**row, "mismatches": len(bad)}


def _crashes(folder: Path, images: int) -> tuple[dict[str, int], list[str]]:
    """States of all formats, on one file and several; those of several ranks; and deltas beside a state."""
    states: list[Crashes] = []
    for number, (files, manifest) in enumerate(product(FILES, FORMATS.values())):
        subfolder, steps = folder / str(number), SPLIT_STEPS if manifest.master is MasterFormat.SPLIT else STEPS
        subfolder.mkdir()
        states.append(crash_points(subfolder, files=files, steps=steps, tries=images, seed=number, manifest=manifest))
    split = [part for part, manifest in zip(states, [*FORMATS.values()] * len(FILES), strict=True)
             if manifest.master is MasterFormat.SPLIT]  # fmt: skip
    ranked = []
    for ranks, master in product(RANKS, MasterFormat):
        subfolder = folder / f"ranks-{ranks}-{master}"
        subfolder.mkdir()
        steps = SPLIT_STEPS if master is MasterFormat.SPLIT else STEPS
        made = rank_crash_points(subfolder, ranks=ranks, steps=steps, tries=images, seed=ranks, master=master)
        ranked.append(made)
        split += [made] if master is MasterFormat.SPLIT else []
    with _memory_folder() as memory:
        deltas = delta_crash_points(memory, steps=DELTA_STEPS, tries=2 * images, seed=1)
    every = [*states, *ranked, deltas]
    bad = [wrong for part in every for wrong in part.bad]
    figures = {
        "crash_points": sum(part.points for part in every),
        "rank_crash_points": sum(part.points for part in ranked),
        "delta_crash_points": deltas.points,
        "split_crash_points": sum(part.points for part in split),
        "bad_recoveries": len(bad),
    }
    return figures, bad


def _kv(folder: Path, _: int) -> tuple[dict[str, Any], list[str]]:
    crashes = [kv_crash_points(folder / str(seed), actions=KV_ACTIONS, tries=KV_IMAGES, seed=seed) for seed in KV_SEEDS]
    bad = [wrong for part in crashes for wrong in part.bad]
    with _memory_folder() as memory:
        kept = [_crash_kept(memory, seed, ahead=True) for seed in KEPT_SEEDS]
        control = _crash_kept(memory, CONTROL_SEED, ahead=False)
    bad += [wrong for part in kept for wrong in part.bad]
    if not control.bad:
        bad.append(f"kept store, seed {CONTROL_SEED}: pages ahead of the journal must be noticed, and were not")
    figures = {
        "kv_crash_points": sum(part.points for part in crashes),
        "kv_erases": sum(part.erases for part in crashes),
        "kept_crash_points": sum(part.journal_images + part.page_images for part in kept),
        "kept_journal_points": sum(part.journal_images for part in kept),
        "kept_continued": sum(part.continued for part in kept),
        "kept_seeds": list(KEPT_SEEDS),
        "bad_kv_recoveries": len(bad),
        "control_points": control.journal_images + control.page_images,
        "control_bad": len(control.bad),
    }
    return figures, bad


def _blocks(folder: Path, _: int) -> tuple[dict[str, Any], list[str]]:
    with _memory_folder() as memory:
        crashes = [block_crash_points(memory / str(seed), actions=BLOCK_ACTIONS, tries=BLOCK_IMAGES, seed=seed)
                   for seed in BLOCK_SEEDS]  # fmt: skip
    killed = kill_writers(folder / "killed", kills=BLOCK_KILLS, seed=1)
    bad = [*killed.bad, *(wrong for part in crashes for wrong in part.bad)]
    figures = {
        "block_crash_points": sum(part.points for part in crashes),
        "block_erases": sum(part.erases for part in crashes),
        "blocks_moved": sum(part.moved for part in crashes),
        "block_kills": killed.kills,
        "durable_blocks": killed.durable,
        "bad_block_recoveries": len(bad),
    }
    return figures, bad


def _crash_kept(folder: Path, seed: int, *, ahead: bool) -> KeptCrashes:
    return find_kept_crash_points(
        folder / f"kept-{seed}-{ahead}", actions=KEPT_ACTIONS, tries=KEPT_IMAGES, seed=seed, ahead=ahead
    )


@contextmanager
def _memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: in an image nothing waits for a drive."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nearflash-crash-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def _kills(folder: Path, _: int) -> tuple[dict[str, int], list[str]]:
    runs = [_campaign(folder / str(files), "kills", KILLS, seed=files, files=files) for files in FILES]
    bad = [wrong for run in runs for wrong in run["bad"]]
    return {"kills": sum(run["kills"] for run in runs), "bad_resumes": len(bad)}, bad


def _ranks(folder: Path, _: int) -> tuple[dict[str, int], list[str]]:
    runs = [_campaign(folder / str(ranks), "rank_kills", RANK_KILLS, seed=ranks, ranks=ranks) for ranks in RANKS]
    bad = [wrong for run in runs for wrong in run["bad"]]
    return {"rank_kills": sum(run["kills"] for run in runs), "bad_rank_resumes": len(bad)}, bad


def _campaign(folder: Path, module: str, kills: int, **options: int) -> dict[str, Any]:
    """Run a campaign in a process that forks: without the threads of this one."""
    folder.mkdir()
    numbers = [text for name, value in {"kills": kills, **options}.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", f"nearflash.bench.training.{module}", str(folder), *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _faults(folder: Path, _: int) -> tuple[dict[str, int], list[str]]:
    states = product(FILES, (MANIFEST, FORMATS["split"]))
    faults: list[Faults] = [inject(folder, files=files, manifest=manifest) for files, manifest in states]
    bad = [wrong for part in faults for wrong in part.bad]
    return {"faults": sum(part.injected for part in faults), "bad_faults": len(bad)}, bad


_PARTS: dict[str, Callable[[Path, int], tuple[dict[str, Any], list[str]]]] = {
    "crashes": _crashes, "kv": _kv, "blocks": _blocks, "kills": _kills, "ranks": _ranks, "faults": _faults
}  # fmt: skip
