"""Builds C++ of the folder hls/ with g++ into shared libraries, cached by the digest of all that went in."""

import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nearflash.abi.errors import NearflashError
from nearflash.sim.cache import cached

__all__ = ["CXX_FLAGS", "HLS", "CompileError", "build_shim", "include_path", "shim"]

HLS = Path(__file__).parents[4] / "hls"
"""The folder of headers and kernels of this checkout."""
CXX_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
"""No contraction: every operation is rounded, as in profile ieee. Subnormals are kept, as nothing sets -ffast-math."""

_SHIMS = Path(__file__).parents[1] / "shims"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class CompileError(NearflashError, RuntimeError):
    """g++ did not take the source; `diagnosis` is its first error, with file and line, `log` its whole output."""

    def __init__(self, diagnosis: str, log: str) -> None:
        super().__init__(diagnosis)
        self.diagnosis, self.log = diagnosis, log


def include_path() -> Path:
    """Folder of the templates. Raises CompileError outside a checkout."""
    folder = HLS / "include"
    if not (folder / "nearflash").is_dir():
        raise CompileError(f"HLS kernels must be built in a checkout of nearflash; there is no {folder}", "")
    return folder


def shim(name: str) -> str:
    """Text of the C++ file of that name in `shims/`."""
    return (_SHIMS / name).read_text()


def build_shim(
    name: str, source: str, *, defines: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None,
    include: Sequence[Path] = (),
) -> Path:  # fmt: skip
    """Shared library of the C++ text `source`, with the texts `files` beside it; headers from `include`, then hls/.

    Raises CompileError: no compiler, or an error in the source.
    """
    folders = [*include, include_path()]
    files = dict(files or {})
    flags = [*CXX_FLAGS, *(f"-D{key}={value}" for key, value in (defines or {}).items())]
    texts = _headers([source, *files.values()], folders)
    parts = [_compiler_version(), source, *(text for pair in sorted((files | texts).items()) for text in pair), *flags]

    def build(work: Path) -> None:
        (work / "source.cpp").write_text(source)
        for file, text in files.items():
            (work / file).write_text(text)
        command = [_compiler(), *flags, "-I.", *(f"-I{folder}" for folder in folders), "-shared", "source.cpp"]
        run = subprocess.run([*command, "-o", "library.so"], cwd=work, capture_output=True, text=True)
        (work / "build.log").write_text(run.stderr)
        if run.returncode:
            raise CompileError(_diagnosis(run.stderr, include), run.stderr)

    return cached(f"hls-{name}", parts, build) / "library.so"


def _headers(sources: Sequence[str], folders: Sequence[Path]) -> dict[str, str]:
    """Texts of all headers that the sources include, by name, and those that these include in turn."""
    found: dict[str, str] = {}
    waiting = [name for source in sources for name in _INCLUDE.findall(source)]
    while waiting:
        name = waiting.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if name not in found and path is not None:
            found[name] = path.read_text()
            waiting += _INCLUDE.findall(found[name])
    return found


def _diagnosis(log: str, include: Sequence[Path]) -> str:
    """The first error, at the line of the user's file (in `include`) that it is in or that led to it."""
    lines = log.splitlines()
    first = next((index for index, line in enumerate(lines) if " error: " in line), None)
    if first is None:
        return log[-2000:]
    own = tuple(str(folder) for folder in include)
    place = next((index for index in range(first, len(lines)) if own and lines[index].startswith(own)), first)
    where, message = lines[place].split(": ")[0], lines[first].partition(" error: ")[2]
    shown = [line for line in lines[place + 1 : place + 3] if re.match(r" +\d* \|", line)]
    return "\n".join([f"{where.strip(':,')}: {message}", *shown])


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def _compiler_version() -> str:
    try:
        shown = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(
            f"a C++17 compiler must be there to simulate HLS kernels, but {_compiler()} does not run ({error}); "
            "install one (Debian: apt install g++) or name it in the environment's CXX", ""
        ) from error  # fmt: skip
    return shown.splitlines()[0]
