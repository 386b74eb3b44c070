"""A cache of built things on disk: one folder for each name and digest of what went into it.

Something is built in a `.tmp` folder under a file lock and renamed when complete: processes that want the same thing
wait for one build, and an interrupted build leaves nothing that counts. Nothing is ever pruned; `make clean` removes
it all.

The root is the environment's NEARFLASH_CACHE, else `build/cache` of the source tree, else of the working folder.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_root", "cached", "locked"]


def cache_root() -> Path:
    """The folder that holds everything; made when missing."""
    tree = Path(__file__).parents[3]
    base = tree if (tree / "pyproject.toml").exists() else Path.cwd()
    root = Path(os.environ.get("NEARFLASH_CACHE") or base / "build" / "cache").resolve()
    root.mkdir(parents=True, exist_ok=True)
    return root


def cached(name: str, parts: Sequence[str], build: Callable[[Path], None]) -> Path:
    """The folder for `name` and the digest of `parts`; `build` fills it where it is not there yet.

    `build` gets a folder that is renamed afterwards, so what it writes must not hold the folder's path. Where it
    raises, the folder stays, with its log, under the name `.tmp`, and the next call begins again.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_root() / f"{name}-{digest}"
    if folder.exists():
        return folder
    with locked(cache_root() / f"{folder.name}.lock"):
        if not folder.exists():
            work = cache_root() / f"{folder.name}.tmp"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            build(work)
            work.rename(folder)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, made when missing, against other processes and threads."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
