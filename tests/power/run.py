"""Power cuts: lives of stores in a guest, and images of its drive as of random moments, repaired and opened.

Exit code 1 where an image is wrong, or where a drive that ignores flushes is not found.
"""

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import FILE_SYSTEM_BYTES, MARK_BYTES, Machine, run_tool
from replay import Cut, Log
from workloads import WORKLOADS

_PART_BYTES = 64 << 10
_FEWER = {"ext4": 1, "xfs": 8}
"""One image in so many is made: those of xfs take seconds in a guest, those of ext4 a fifth of one."""
_CONTROLS = 20
"""Images of a drive that ignores flushes."""


class Result:
    """Images that were opened, and what was wrong."""

    def __init__(self, wrong: Sequence[str | None]) -> None:
        self.images = len(wrong)
        self.bad = [one for one in wrong if one is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads that are asked for."""
    parser = argparse.ArgumentParser(description="Power cuts on a real kernel.")
    parser.add_argument("--folder", type=Path, default=Path("build/power"), help="Of kernel, images and logs.")
    parser.add_argument("--images", type=int, default=400, help="Images of each life on ext4. (default: 400)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--file-systems", nargs="+", choices=FILE_SYSTEM_BYTES, default=list(FILE_SYSTEM_BYTES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="Images that are opened at one time. (default: 2)")
    given = parser.parse_args(arguments)
    machine = Machine(given.folder.absolute())
    lives = product(given.file_systems, given.workloads)
    return 1 if sum([_run(machine, workload, file_system, given) for file_system, workload in lives]) else 0


def _run(machine: Machine, workload: str, file_system: str, given: argparse.Namespace) -> bool:
    """Whether something is wrong."""
    base, path = machine.record(workload, file_system)
    log, start = Log(path), time.monotonic()
    check = _check_here if file_system == "ext4" else partial(_check_in_guest, machine, file_system)
    cuts = log.cuts(base, max(given.images // _FEWER[file_system], 1), given.seed)
    good = Result(check(workload, cuts, given.jobs))
    cuts = log.cuts(base, _CONTROLS, given.seed, flushes=False)
    control = Result(check(workload, cuts, given.jobs))
    print(
        f"{workload} on {file_system}: {good.images} images, {len(good.bad)} bad; a drive that ignores flushes: "
        f"{len(control.bad)} of {control.images} bad; {len(log.entries)} writes and flushes, {log.flushes} of them "
        f"flushes; {time.monotonic() - start:.0f} s",
        flush=True,
    )
    for wrong in good.bad[:10]:
        print(f"BAD {wrong}")
    for wrong, count in Counter(re.sub(r"^.*?entry \d+: ", "", wrong)[:70] for wrong in control.bad).most_common(3):
        print(f"  control: {count} times {wrong}")
    base.unlink()
    path.unlink()
    return bool(good.bad) or not control.bad


def _check_here(workload: str, cuts: Iterable[Cut], jobs: int) -> list[str | None]:
    """Each image repaired by the host's tools."""
    wrong, waiting = list[str | None](), deque[Future[str | None]]()
    with ProcessPoolExecutor(jobs) as pool:
        for cut in cuts:
            waiting.append(pool.submit(_check, workload, cut))
            if len(waiting) > 2 * jobs:  # each has an image
                wrong.append(waiting.popleft().result())
        return wrong + [job.result() for job in waiting]


def _check_in_guest(
    machine: Machine, file_system: str, workload: str, cuts: Iterable[Cut], jobs: int
) -> list[str | None]:  # fmt: skip
    """Each image mounted in a guest, by the kernel that has written it."""
    images, cases, stated = machine.folder / "images", machine.folder / "cases", list[dict[str, Any]]()
    with images.open("wb") as file:
        for number, cut in enumerate(cuts):
            stated.append({"marks": cut.marks, "following": cut.following[:2]})
            _write_sparsely(file, number * FILE_SYSTEM_BYTES[file_system], cut.image[:-MARK_BYTES])
        file.truncate(len(stated) * FILE_SYSTEM_BYTES[file_system])
    text = json.dumps(stated).encode()
    cases.write_bytes(text.ljust(-(-len(text) // _PART_BYTES) * _PART_BYTES))
    try:
        wrong = machine.check(workload, file_system, images, cases, 300 + 20 * len(stated))
    finally:
        images.unlink()
        cases.unlink()
    if len(wrong) != len(stated):
        raise RuntimeError(f"the guest must check {len(stated)} images, not {len(wrong)}")
    return wrong


def _write_sparsely(file: IO[bytes], offset: int, image: bytearray) -> None:
    for start in range(0, len(image), _PART_BYTES):
        part = image[start : start + _PART_BYTES]
        if any(part):
            file.seek(offset + start)
            file.write(part)


def _check(workload: str, cut: Cut) -> str | None:
    """Repair and open one image; None where all is as it must be."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as inside:
        try:
            folder = _extract(Path(inside), cut)
            wrong = WORKLOADS[workload].check(folder, cut.marks, cut.following)
        except Exception as error:  # whatever it is: the image is bad
            wrong = f"{type(error).__name__}: {error}".replace(inside, "")
    return None if wrong is None else f"{workload}, entry {cut.number}: {wrong}"


def _extract(inside: Path, cut: Cut) -> Path:
    """The files of an image, its journal replayed."""
    image, folder = inside / "image", inside / "files"
    image.write_bytes(cut.image[:-MARK_BYTES])
    folder.mkdir()
    repaired = shutil.which("e2fsck") or "e2fsck"
    try:
        run_tool(repaired, "-fy", image)
    except RuntimeError as error:
        if " ended with 1:" not in str(error):  # 1: repaired
            raise
    run_tool("debugfs", "-R", f"rdump / {folder}", image)
    image.unlink()
    return folder


if __name__ == "__main__":
    sys.exit(main())
