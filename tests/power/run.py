"""Power cuts: lives of stores in a guest, and images of its drive as of random moments, repaired and opened.

Exit code 1 where an image is wrong, or where a drive that ignores flushes is not found.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import FILE_SYSTEM_BYTES, MARK_BYTES, Machine, run_tool
from replay import PART_BYTES, Cut, Log
from workloads import WORKLOADS

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
    parser.add_argument(
        "--mount", action="store_true",
        help="Mount the images here, as root, not in a guest: many times faster; a bad one can crash this machine.",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.mount:
        _check_that_mounts_work(parser, given.file_systems)
    machine = Machine(given.folder.absolute())
    lives = product(given.file_systems, given.workloads)
    return 1 if sum([_run(machine, workload, file_system, given) for file_system, workload in lives]) else 0


def _check_that_mounts_work(parser: argparse.ArgumentParser, file_systems: Sequence[str]) -> None:
    known = Path("/proc/filesystems").read_text().split()
    if os.geteuid():
        parser.error("--mount must be run as root")
    if missing := [name for name in file_systems if name not in known]:
        parser.error(f"--mount needs a kernel with {' and '.join(missing)}: see /proc/filesystems")


def _run(machine: Machine, workload: str, file_system: str, given: argparse.Namespace) -> bool:
    """Whether something is wrong."""
    base, path = machine.record(workload, file_system)
    log, start = Log(path), time.monotonic()
    images = given.images if given.mount else max(given.images // _FEWER[file_system], 1)
    if given.mount or file_system == "ext4":
        extract = partial(_mount, file_system) if given.mount else _extract
        check = partial(_check_here, extract, workload, base, path, given.seed, given.jobs)
    else:
        check = partial(_check_in_guest, machine, file_system, workload, base, log, given.seed)
    good, control = Result(check(images, True)), Result(check(_CONTROLS, False))
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


Extract = Callable[[Path, Cut], Any]
"""A context with the folder of an image's files."""


def _check_here(
    extract: Extract, workload: str, base: Path, log: Path, seed: int, jobs: int, images: int, flushes: bool
) -> list[str | None]:
    """Each image opened by this machine's tools or kernel; each job makes its own images."""
    shares = [(images * (job + 1)) // jobs - images * job // jobs for job in range(jobs)]
    with ProcessPoolExecutor(jobs) as pool:
        check = partial(_check_share, extract, workload, base, log, flushes)
        done = pool.map(check, (f"{seed} {job}" for job in range(jobs)), shares)
        return [wrong for share in done for wrong in share]


def _check_share(
    extract: Extract, workload: str, base: Path, log: Path, flushes: bool, seed: str, images: int
) -> list[str | None]:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return [_check(extract, workload, cut) for cut in Log(log).cuts(base, images, seed, flushes=flushes)]


def _check_in_guest(
    machine: Machine, file_system: str, workload: str, base: Path, log: Log, seed: int, count: int, flushes: bool
) -> list[str | None]:
    """Each image mounted in a guest, by the kernel that has written it."""
    images, cases, stated = machine.folder / "images", machine.folder / "cases", list[dict[str, Any]]()
    with images.open("wb") as file:
        for number, cut in enumerate(log.cuts(base, count, seed, flushes=flushes)):
            stated.append({"marks": cut.marks, "following": cut.following[:2]})
            _write_sparsely(file, number * FILE_SYSTEM_BYTES[file_system], cut)
        file.truncate(len(stated) * FILE_SYSTEM_BYTES[file_system])
    text = json.dumps(stated).encode()
    cases.write_bytes(text.ljust(-(-len(text) // PART_BYTES) * PART_BYTES))
    try:
        wrong = machine.check(workload, file_system, images, cases, 300 + 20 * len(stated))
    finally:
        images.unlink()
        cases.unlink()
    if len(wrong) != len(stated):
        raise RuntimeError(f"the guest must check {len(stated)} images, not {len(wrong)}")
    return wrong


def _write_sparsely(file: IO[bytes], offset: int, cut: Cut) -> None:
    """Write the file system, without the marks behind it."""
    size_bytes = len(cut.image) - MARK_BYTES
    for start in cut.parts:
        file.seek(offset + start)
        file.write(cut.image[start : min(start + PART_BYTES, size_bytes)])


def _check(extract: Extract, workload: str, cut: Cut) -> str | None:
    """Open one image; None where all is as it must be."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as inside:
        try:
            with extract(Path(inside), cut) as folder:
                wrong = WORKLOADS[workload].check(folder, cut.marks, cut.following)
        except Exception as error:  # whatever it is: the image is bad
            wrong = f"{type(error).__name__}: {error}".replace(inside, "")
    return None if wrong is None else f"{workload}, entry {cut.number}: {wrong}"


@contextmanager
def _extract(inside: Path, cut: Cut) -> Iterator[Path]:
    """The files of an image of ext4, its journal replayed by e2fsck."""
    image, folder = _write_image(inside, cut)
    repaired = shutil.which("e2fsck") or "e2fsck"
    try:
        run_tool(repaired, "-fy", image)
    except RuntimeError as error:
        if " ended with 1:" not in str(error):  # 1: repaired
            raise
    run_tool("debugfs", "-R", f"rdump / {folder}", image)
    image.unlink()
    yield folder


@contextmanager
def _mount(file_system: str, inside: Path, cut: Cut) -> Iterator[Path]:
    """The files of an image that this machine's kernel has mounted: it replays the journal."""
    image, folder = _write_image(inside, cut)
    options = "loop,nouuid" if file_system == "xfs" else "loop"  # all images have the same one
    run_tool("mount", "-t", file_system, "-o", options, image, folder)
    try:
        yield folder
    finally:
        run_tool("umount", folder)


def _write_image(inside: Path, cut: Cut) -> tuple[Path, Path]:
    """The image as a file, and an empty folder."""
    image, folder = inside / "image", inside / "files"
    folder.mkdir()
    with image.open("wb") as file:
        _write_sparsely(file, 0, cut)
        file.truncate(len(cut.image) - MARK_BYTES)
    return image, folder


if __name__ == "__main__":
    sys.exit(main())
