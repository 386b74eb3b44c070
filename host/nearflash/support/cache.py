"""A cache of built things on disk: one folder for each name and digest of what went into it.

Something is built in a `.tmp` folder under a file lock and renamed when complete: processes that want the same thing
wait for one build, and an interrupted build leaves nothing that counts. Nothing is ever pruned; `make clean` removes
it all.

The root is the environment's NEARFLASH_CACHE, else `build/cache` of the source tree, else `nearflash` in the user's
cache ($XDG_CACHE_HOME, ~/.cache): never the working folder, which may be anybody's. What lies there is loaded and run,
so nobody else may write to it.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nearflash.abi.errors import ConfigError
from nearflash.support.files import open_regular
from nearflash.support.folders import check_private, private_folder, user_folder

__all__ = ["VARIABLE", "build_once", "cache_root", "hold_lock"]

VARIABLE = "NEARFLASH_CACHE"


def cache_root() -> Path:
    """The folder that holds everything; made when missing. Raises ConfigError where others can write to it."""
    given = os.environ.get(VARIABLE)
    root = Path(given).absolute() if given else _tree_cache() or user_folder("XDG_CACHE_HOME")
    try:
        return private_folder(root)
    except OSError as error:
        raise _unusable(root, error) from error


def _tree_cache() -> Path | None:
    """Find the cache of the source tree that this file lies in; None for an installed copy."""
    packages = Path(__file__).parents[2]
    is_tree = packages.name == "host" and (packages.parent / "pyproject.toml").is_file()
    return packages.parent / "build" / "cache" if is_tree else None


def _unusable(folder: Path, error: OSError) -> ConfigError:
    where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return ConfigError(
        f"{folder} must be a folder that only you can write to, as what was compiled is kept and run from there, but "
        f"{where}; {VARIABLE} names another one"
    )


def build_once(name: str, parts: Sequence[str], build: Callable[[Path], None]) -> Path:
    """The folder for `name` and the digest of `parts`; `build` fills it where it is not there yet.

    `build` gets a folder that is renamed afterwards, so what it writes must not hold the folder's path. Where it
    raises, the folder stays, with its log, under the name `.tmp`, and the next call begins again. Raises ConfigError
    as `cache_root`, also where others can write to what was built.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_root() / f"{name}-{digest}"
    if folder.exists():
        return _check_private(folder)
    with hold_lock(cache_root() / f"{folder.name}.lock"):
        if not folder.exists():
            work = cache_root() / f"{folder.name}.tmp"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(0o700)
            build(work)
            work.rename(folder)
    return _check_private(folder)


def _check_private(folder: Path) -> Path:
    try:
        check_private(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, made when missing, against other processes and threads."""
    with os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
