"""The bench `fuzz`: files that are damaged, forged under checksums that hold, or mixed of valid pieces.

A damaged file must give what it held before, a documented warning, or a named error. So must one that was mixed:
*misdirected*, with pieces of other files, tensors, groups or branches in a place that is not theirs. A forged one is
well-formed or gives a named error: one that is well-formed holds what the forger wrote, which no checksum can notice.
"""

import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from nearflash.abi.errors import LostStepWarning, NearflashError, UncheckedWarning
from nearflash.bench.options import Option, check_choices
from nearflash.bench.storage.fuzz.mutations import Files, FuzzedFormat, damage
from nearflash.bench.storage.fuzz.sessions import session
from nearflash.bench.storage.fuzz.stores import export, flash, lasting, state
from nearflash.bench.storage.fuzz.tensors import checkpoint, matrix, spill, topk, weights
from nearflash.bench.storage.fuzz.texts import drives, journal, machine, plan, policy, results, transcript

__all__ = ["FORMATS", "run"]

HANG_S = 20
FORMATS: dict[str, Callable[[Path], FuzzedFormat]] = {
    "state": state, "export": export, "flash": flash, "kept": lasting, "journal": journal, "session": session,
    "transcript": transcript, "policy": policy, "plan": plan, "results": results, "drives": drives, "machine": machine,
    "weights": weights, "checkpoint": checkpoint, "matrix": matrix, "topk": topk, "spill": spill,
}  # fmt: skip
"""Small files: by name, how a subject is made in an empty folder."""
CLASSES = ("damaged", "forged", "misdirected")
_BAD = ("raw_errors", "silent", "hangs")
_OUTCOMES = ("same", "warned", "rejected", "well_formed", *_BAD)


def run(
    mutations: Annotated[int, Option("Mutations of each format.", int, metavar="N")] = 2520,
    formats: Annotated[Collection[str] | None, Option("Of these formats (default: all).", many=True)] = None,
) -> Iterator[dict[str, Any]]:
    """A row a format and class of mutations, and one of all; what went wrong goes to standard error.

    Raises CommandError for other formats.
    """
    wanted = check_choices("formats", formats, FORMATS)
    total = dict.fromkeys(("mutations", *_OUTCOMES), 0)
    with tempfile.TemporaryDirectory(prefix="nearflash-fuzz-") as folder:
        for name, make in FORMATS.items():
            if name not in wanted:
                continue
            subfolder = Path(folder) / name
            subfolder.mkdir()
            for kind, counts in _fuzz(name, make(subfolder), subfolder / "mutated", mutations).items():
                total = {key: total[key] + counts[key] for key in total}
                yield {"format": name, "class": kind, **counts}
    yield {"format": "all", "class": "all", **total}


def _fuzz(name: str, subject: FuzzedFormat, folder: Path, mutations: int) -> dict[str, dict[str, int]]:
    rng = random.Random(name)
    counts = {kind: dict.fromkeys(("mutations", *_OUTCOMES), 0) for kind in CLASSES}
    folder.mkdir()
    _put(folder, subject.files)
    expected = subject.read(folder)
    for number in range(mutations):
        kind = CLASSES[number % len(CLASSES)]
        if kind == "damaged":
            files = damage(subject.files, rng)
        else:
            files = (subject.forge if kind == "forged" else subject.misdirect)(rng)
        _put(folder, files)
        outcome, detail = _outcome(subject, folder, expected)
        if outcome == "silent" and (kind == "forged" or not subject.sealed):
            outcome = "well_formed"
        counts[kind]["mutations"] += 1
        counts[kind][outcome] += 1
        if outcome in _BAD:
            print(f"{name}, mutation {number}, {kind}: {outcome}: {detail}", file=sys.stderr)
    return counts


def _put(folder: Path, files: Files) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _outcome(subject: FuzzedFormat, folder: Path, expected: object) -> tuple[str, str]:
    def hung(number: int, frame: FrameType | None) -> None:
        raise _HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    try:
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always")
            content = subject.read(folder)
    except _HungError:
        return "hangs", ""
    except NearflashError:
        return "rejected", ""
    except BaseException as error:
        return "raw_errors", repr(error)[:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if any(issubclass(warning.category, (LostStepWarning, UncheckedWarning)) for warning in noticed):
        return "warned", ""
    right = content == expected or content in subject.older or subject.accepts(content, expected)
    return ("same", "") if right else ("silent", "another content")


class _HungError(Exception):
    """Reading took longer than HANG_S."""
