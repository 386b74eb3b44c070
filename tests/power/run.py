"""Power cuts: lives of stores in a guest, and images of its drive as of random moments, repaired and opened.

Exit code 1 where an image is wrong, or where a drive that ignores flushes is not found.
"""

import argparse
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from machine import MARK_BYTES, Machine, run_tool
from replay import Cut, Log
from workloads import WORKLOADS

_CONTROL = 10
"""One image in so many is of a drive that ignores flushes."""


@dataclass
class Result:
    """Images that were opened, and what was wrong."""

    images: int = 0
    bad: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads that are asked for."""
    parser = argparse.ArgumentParser(description="Power cuts on a real kernel.")
    parser.add_argument("--folder", type=Path, default=Path("build/power"), help="Of kernel, images and logs.")
    parser.add_argument("--images", type=int, default=400, help="Images of each life. (default: 400)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="Images that are opened at one time. (default: 2)")
    given = parser.parse_args(arguments)
    machine = Machine(given.folder.absolute())
    return 1 if sum([_run(machine, workload, "ext4", given) for workload in given.workloads]) else 0


def _run(machine: Machine, workload: str, file_system: str, given: argparse.Namespace) -> bool:
    """Whether something is wrong."""
    base, path = machine.record(workload, file_system)
    log, start = Log(path), time.monotonic()
    good = _check_all(log, base, workload, given.images, given, flushes=True)
    control = _check_all(log, base, workload, max(given.images // _CONTROL, 20), given, flushes=False)
    print(
        f"{workload} on {file_system}: {good.images} images, {len(good.bad)} bad; a drive that ignores flushes: "
        f"{len(control.bad)} of {control.images} bad; {len(log.entries)} writes and flushes, {log.flushes} of them "
        f"flushes; {time.monotonic() - start:.0f} s",
        flush=True,
    )
    for wrong in good.bad[:10]:
        print(f"BAD {wrong}")
    for wrong, count in Counter(wrong.partition(": ")[2][:60] for wrong in control.bad).most_common(3):
        print(f"  control: {count} times {wrong}")
    base.unlink()
    path.unlink()
    return bool(good.bad) or not control.bad


def _check_all(
    log: Log, base: Path, workload: str, count: int, given: argparse.Namespace, *, flushes: bool
) -> Result:  # fmt: skip
    result = Result()
    with ProcessPoolExecutor(given.jobs) as pool:
        jobs = []
        for cut in log.cuts(base, count, given.seed, flushes=flushes):
            jobs.append(pool.submit(_check, workload, cut))
            if len(jobs) > 2 * given.jobs:  # each has an image
                _add(result, jobs.pop(0).result())
        for job in jobs:
            _add(result, job.result())
    return result


def _add(result: Result, wrong: str | None) -> None:
    result.images += 1
    result.bad += [] if wrong is None else [wrong]


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
