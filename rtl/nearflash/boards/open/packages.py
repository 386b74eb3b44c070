"""Programs of Debian sid in a private folder: downloaded with apt, unpacked, and run with their own loader.

The system's apt and its libraries stay untouched: apt gets lists, cache, sources and an empty status of its own, so
that it downloads the whole closure, the C library with it, and nothing is installed. The mirror is that of the system's
own Debian sources.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from nearflash.abi.errors import NearflashError
from nearflash.support.folders import check_private, private_folder, user_folder

__all__ = ["PACKAGES", "SidPrograms", "ToolsError", "fetch", "find_programs", "mirror", "package_versions", "sid_root"]

PACKAGES = ("nextpnr-himbaechel-xilinx", "prjxray", "prjxray-database")
"""What the flow needs; the rest of the closure is what these need."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_LOADER = "usr/lib64/ld-linux-x86-64.so.2"
_LOOK_S = 5.0
"""Seconds between looks at a program's output."""
_TARGETS = "$(IDENTIFIER)|$(ORIGIN)|$(COMPONENT)|$(RELEASE)|$(REPO_URI)"


class ToolsError(NearflashError, RuntimeError):
    """A program of the flow is missing, or failed; the message has the end of its output."""


@dataclass(frozen=True)
class SidPrograms:
    """Unpacked packages: where they lie, and which they are."""

    root: Path
    versions: Mapping[str, str]
    """Version of each of PACKAGES."""

    def command(self, program: str, *arguments: str | Path) -> list[str]:
        """A program of the packages with its loader and its libraries."""
        loader = [str(self.root / _LOADER), "--library-path", str(self.root / _LIBRARIES)]
        return [*loader, str(self.root / "usr/bin" / program), *map(str, arguments)]

    def run(self, program: str, *arguments: str | Path, log: Path, stop: Callable[[str], object] | None = None) -> str:
        """Run a program as `run_logged` does. Raises ToolsError where it fails."""
        environment = {**os.environ, "PYTHONHOME": str(self.root / "usr")}
        return run_logged(self.command(program, *arguments), log, environment, stop)

    def chip_database(self, device: str) -> Path:
        """nextpnr's database of a device (xc7z020). Raises ToolsError that lists those that there are."""
        folder = self.root / "usr/share/nextpnr/himbaechel/xilinx"
        path = folder / f"chipdb-{device}.bin"
        if not path.exists():
            known = sorted(found.stem.removeprefix("chipdb-") for found in folder.glob("chipdb-*.bin"))
            raise ToolsError(f"device must be one of {', '.join(known)}, not {device!r}")
        return path

    def bit_database(self, family: str) -> Path:
        """prjxray's database of a family (zynq7)."""
        return self.root / "usr/share/prjxray/database" / family


def run_logged(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    stop: Callable[[str], object] | None = None,
) -> str:
    """Run a command; its output goes to `log` and comes back.

    It is ended when `stop` of its output so far is true, which is no failure: the output that comes back tells.
    Raises ToolsError where it fails or does not exist.
    """
    with log.open("w") as sink:
        try:
            running = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise ToolsError(f"{command[0]} must run: {error}") from error
        try:
            stopped = _wait(running, log, stop)
        finally:
            running.kill()
            running.wait()
    text = log.read_text(errors="replace")
    if running.returncode and not stopped:
        raise ToolsError(f"{Path(command[-1]).name if len(command) == 1 else _program(command)} failed "
                         f"({running.returncode}); {log} ends:\n{text[-1500:]}")  # fmt: skip
    return text


def _wait(running: subprocess.Popen[bytes], log: Path, stop: Callable[[str], object] | None) -> bool:
    """Wait for the program's end, or until `stop` of its output is true: then True."""
    while True:
        try:
            running.wait(_LOOK_S if stop else None)
            return False
        except subprocess.TimeoutExpired:
            if stop is not None and stop(log.read_text(errors="replace")):
                return True


def _program(command: Sequence[str]) -> str:
    """The name that a person knows: behind a loader and its library path, the program."""
    return Path(command[3] if command[0].endswith(Path(_LOADER).name) else command[0]).name


def sid_root() -> Path:
    """The private folder: the environment's NEARFLASH_SID, else `nearflash/sid` in the user's cache.

    Raises ToolsError where others can write to it: its programs are run.
    """
    given = os.environ.get("NEARFLASH_SID")
    root = Path(given).absolute() if given else user_folder("XDG_CACHE_HOME") / "sid"
    if root.exists():
        _check(root, check_private)
    return root.resolve()


def _check(folder: Path, check: Callable[[Path], object]) -> None:
    try:
        check(folder)
    except OSError as error:
        raise ToolsError(
            f"{folder} must be a folder that only you can write to, as its programs are run, but {error.filename}: "
            f"{error.strerror}; NEARFLASH_SID names another one"
        ) from error


def find_programs(folder: Path | None = None) -> SidPrograms | None:
    """The programs, where they were fetched before."""
    root = (folder or sid_root()) / "root"
    try:
        versions = json.loads((root / "packages.json").read_text())
    except (OSError, ValueError):
        return None
    return SidPrograms(root, {name: versions[name] for name in PACKAGES})


def fetch(folder: Path | None = None) -> SidPrograms:
    """The programs; downloaded (30 MB) and unpacked (750 MB) at the first call.

    Raises ToolsError with the reason where they cannot be had: no apt, no Debian, no network, no such package.
    """
    folder = folder or sid_root()
    if (found := find_programs(folder)) is not None:
        return found
    missing = [program for program in ("apt-get", "dpkg-deb") if shutil.which(program) is None]
    if missing or not _KEYRING.exists():
        what = ", ".join([*missing, *([] if _KEYRING.exists() else [str(_KEYRING)])])
        raise ToolsError(
            f"the open flow needs programs of Debian sid, and a Debian system to fetch them, but has no {what}"
        )
    _check(folder, private_folder)
    archives = _download(folder)
    work = folder / "root.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for archive in archives:
        run_logged(["dpkg-deb", "-x", str(archive), str(work)], folder / "unpack.log")
    (work / "packages.json").write_text(json.dumps(package_versions(archives), indent=1))
    work.rename(folder / "root")
    return SidPrograms(folder / "root", {name: package_versions(archives)[name] for name in PACKAGES})


def _download(folder: Path) -> list[Path]:
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text("")
    (folder / "sid.sources").write_text(
        f"Types: deb\nURIs: {mirror()}\nSuites: sid\nComponents: main\nSigned-By: {_KEYRING}\n"
    )
    options = {
        "Dir::Etc::sourcelist": folder / "sid.sources", "Dir::Etc::sourceparts": "-", "Dir::State": folder / "state",
        "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache", "APT::Architecture": "amd64",
    }  # fmt: skip
    apt = ["apt-get", "-q", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    try:
        run_logged([*apt, "update"], folder / "update.log")
        install = [*apt, "install", "-y", "--no-install-recommends", "--download-only", *PACKAGES]
        run_logged(install, folder / "download.log")
    except ToolsError as error:
        raise ToolsError(
            f"the open flow needs {', '.join(PACKAGES)} of Debian sid, which could not be had: {error}"
        ) from error
    return sorted((folder / "cache/archives").glob("*.deb"))


def mirror() -> str:
    """Address of the Debian archive that this system uses. Raises ToolsError where it uses none."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", _TARGETS], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        identifier, origin, component, release, address = line.split("|")
        if identifier == "Packages" and origin in ("Debian", "") and component == "main" and "security" not in release:
            return address
    raise ToolsError("the open flow needs programs of Debian sid, but this system's apt has no Debian archive")


def package_versions(archives: Sequence[Path]) -> dict[str, str]:
    """Version of each package by the names of its archives, as apt writes them."""
    names = (re.fullmatch(r"([^_]+)_([^_]+)_[^_]+\.deb", path.name) for path in archives)
    return {found[1]: unquote(found[2]) for found in names if found}
