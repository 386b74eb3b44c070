"""C++ as shared libraries: built with g++ at first use, and found in a wheel ready for the processor at hand.

A library is kept in the build cache (nearflash.support.cache) by the digest of its texts, the flags, the compiler and
the processor, so it is built once, also by several processes at once; ctypes calls it without Python's lock. Every
floating-point operation rounds by itself: nothing is contracted or reordered, and no flag flushes subnormal numbers.
"""

import ctypes
import functools
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError
from nearflash.support.cache import build_once

__all__ = [
    "INCLUDE",
    "TARGETS",
    "CompileError",
    "ProcessorLevel",
    "build_library",
    "compile_source",
    "compiler",
    "compiler_version",
    "find_address",
    "find_headers",
    "load_library",
    "locate_prebuilt",
    "pick_target",
]

INCLUDE = Path(__file__).parent
"""Where `vectors.hpp` and `crc32c.hpp` are."""
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-Wno-psabi")
_HEADER = re.compile(r'#include "([^"]+)"')


class CompileError(NearflashError, RuntimeError):
    """g++ did not take the source; `diagnosis` is its first error, with file and line, `log` its whole output."""

    def __init__(self, diagnosis: str, log: str) -> None:
        super().__init__(diagnosis)
        self.diagnosis, self.log = diagnosis, log


@dataclass(frozen=True)
class ProcessorLevel:
    """Processors that a library can be built for: those with these features, as /proc/cpuinfo names them."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2"))
_V4 = frozenset(
    ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vbmi2", "vpclmulqdq", "pclmulqdq")
)
TARGETS = (
    ProcessorLevel(
        "x86-64-v4", ("-march=x86-64-v4", "-mavx512vbmi", "-mavx512vbmi2", "-mpclmul", "-mvpclmulqdq"), _V3 | _V4
    ),
    ProcessorLevel("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""What wheels carry libraries for, the best first."""


def load_library(source: Path) -> ctypes.CDLL:
    """The functions of a C++ file of this package, which may include headers beside it or of support/.

    From a wheel's library for this processor, else built. Raises CompileError: no compiler; ConfigError: no cache.
    """
    target = pick_target()
    ready = locate_prebuilt(source, target)
    return ctypes.CDLL(str(ready if ready.is_file() else compile_source(source, target)))


def locate_prebuilt(source: Path, target: ProcessorLevel) -> Path:
    """The place where a wheel has the library of a C++ file."""
    return source.with_suffix(f".{target.name}.so")


def compile_source(source: Path, target: ProcessorLevel) -> Path:
    """Build the library of a C++ file of this package for a target. Raises CompileError, ConfigError."""
    flags, folders = (*_FLAGS, *target.flags), (source.parent, INCLUDE)
    return build_library(source.stem, source.read_text(), "nearflash's loops over vectors", flags, folders=folders)


@functools.cache
def pick_target() -> ProcessorLevel:
    """The best of TARGETS that this processor is, else one of its own."""
    features = _features()
    found = next((target for target in TARGETS if target.features <= features), None)
    native = "-march=native" if platform.machine() == "x86_64" else "-mcpu=native"
    return found or ProcessorLevel(f"{platform.machine()}-native", (native,), features)


def _features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def build_library(
    name: str, source: str, purpose: str, flags: Sequence[str], *, files: Mapping[str, str] | None = None,
    folders: Sequence[Path] = (), users: Sequence[Path] = (),
) -> Path:  # fmt: skip
    """Shared library of the C++ text `source`, with the texts `files` beside it; headers from `folders`, in order.

    purpose: what cannot be without a compiler; users: those of `folders` whose lines an error is shown at. Raises
    CompileError: no compiler, or an error in the source; ConfigError: no cache.
    """
    files = dict(files or {})
    texts = find_headers([source, *files.values()], folders)
    own = sorted(_features()) if any(flag.endswith("=native") for flag in flags) else []
    parts = [_require_compiler(purpose), *own, source]
    parts += [*(text for pair in sorted((files | texts).items()) for text in pair), *flags]

    def build(work: Path) -> None:
        (work / "source.cpp").write_text(source)
        for file, text in files.items():
            (work / file).write_text(text)
        command = [compiler(), *flags, "-I.", *(f"-I{folder}" for folder in folders), "-shared", "source.cpp"]
        run = subprocess.run([*command, "-o", "library.so"], cwd=work, capture_output=True, text=True)
        (work / "build.log").write_text(run.stderr)
        if run.returncode:
            raise CompileError(_diagnosis(run.stderr, users), run.stderr)
        with (work / "library.so").open("rb") as library:
            os.fsync(library.fileno())

    return build_once(name, parts, build) / "library.so"


def find_address(array: Any) -> int:
    """The address of a numpy array's first element; they must follow one another. Raises ValueError."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # six times as fast as numpy's own `ctypes.data`
    except (TypeError, ValueError, BufferError):  # read-only, or empty
        if not array.flags.c_contiguous:
            raise ValueError("array must be contiguous for compiled loops, not strided: copy it") from None
        return int(array.ctypes.data)


def _require_compiler(purpose: str) -> str:
    """The compiler's version. Raises CompileError, with what cannot be without it, where there is none."""
    try:
        return compiler_version()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(
            f"a C++17 compiler must be there for {purpose}, but {compiler()} does not run ({error}); "
            "install one (Debian: apt install g++) or name it in the environment's CXX", ""
        ) from error  # fmt: skip


@functools.cache
def compiler_version() -> str:
    """The first line that it prints of itself. Raises OSError, CalledProcessError where it does not run."""
    shown = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return shown.splitlines()[0]


def compiler() -> str:
    """The C++ compiler: the environment's CXX, else g++."""
    return os.environ.get("CXX", "g++")


def find_headers(sources: Sequence[str], folders: Sequence[Path]) -> dict[str, str]:
    """Texts of all headers that the sources include, by name, and those that these include in turn."""
    found: dict[str, str] = {}
    waiting = [name for source in sources for name in _HEADER.findall(source)]
    while waiting:
        name = waiting.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if name not in found and path is not None:
            found[name] = path.read_text()
            waiting += _HEADER.findall(found[name])
    return found


def _diagnosis(log: str, users: Sequence[Path]) -> str:
    """The first error, at the line of the user's file (in `users`) that it is in or that led to it."""
    lines = log.splitlines()
    first = next((index for index, line in enumerate(lines) if " error: " in line), None)
    if first is None:
        return log[-2000:]
    own = tuple(str(folder) for folder in users)
    place = next((index for index in range(first, len(lines)) if own and lines[index].startswith(own)), first)
    where, message = lines[place].split(": ")[0], lines[first].partition(" error: ")[2]
    shown = [line for line in lines[place + 1 : place + 3] if re.match(r" +\d* \|", line)]
    return "\n".join([f"{where.strip(':,')}: {message}", *shown])
