"""Folders whose files are run: nobody else may put one there.

What is compiled is kept and loaded again, so who can write to the folder, or to one that it lies in, can run code as
its user.
"""

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

__all__ = ["check_private", "private_folder", "user_folder"]


_DEFAULTS = {"XDG_CACHE_HOME": ".cache", "XDG_STATE_HOME": ".local/state", "XDG_DATA_HOME": ".local/share"}


def user_folder(variable: str) -> Path:
    """Our folder below XDG_CACHE_HOME, XDG_STATE_HOME or XDG_DATA_HOME, which count where they are absolute paths.

    Raises OSError for a user without a home. Source: the XDG base directory specification.
    """
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():
        return given / "nearflash"
    try:
        return Path.home() / _DEFAULTS[variable] / "nearflash"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, f"this user has no home: set HOME, or {variable}", "~") from error


def private_folder(folder: Path) -> Path:
    """A folder that passes `check_private`, made where it is missing (0700; 0755 above); its path without links.

    Raises OSError.
    """
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir(0o700 if path == folder else 0o755, exist_ok=True)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error), str(folder)) from error
    check_private(folder)
    return folder.resolve()


def check_private(folder: Path) -> None:
    """Raise OSError, whose `strerror` has the remedy, for a folder that others can write to or put in another's place.

    It, and what it lies in, must belong to this user, to root, or to who owns this code; and only they may write
    there, but for folders with a sticky bit above it, where nobody renames what is another's. A group counts as its
    user where it has the user's name and no other member.
    """
    trusted = {0, os.geteuid(), Path(__file__).stat().st_uid}
    given, real = folder.absolute(), folder.resolve(strict=True)
    for path in (given, *given.parents, real, *real.parents):
        status = path.lstat()
        if status.st_uid not in trusted:
            raise _refusal(path, f"it must belong to you or root, not to user {status.st_uid}: choose another folder")
        if stat.S_ISLNK(status.st_mode):
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise _refusal(path, "it must be a folder: choose another")
        writable = stat.S_IWOTH | (0 if _is_users_own_group(status) else stat.S_IWGRP)
        if status.st_mode & writable and (path == real or not status.st_mode & stat.S_ISVTX):
            raise _refusal(path, f"nobody else may write there: run `chmod go-w {path}`, or choose another folder")


def _is_users_own_group(found: os.stat_result) -> bool:
    try:
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def _refusal(path: Path, why: str) -> OSError:
    return OSError(errno.EPERM, why, str(path))
