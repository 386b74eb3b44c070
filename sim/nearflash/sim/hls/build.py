"""Builds C++ of the folder hls/ with g++ into shared libraries, cached by the digest of all that went in."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nearflash.support.native import CompileError, build_library

__all__ = ["CXX_FLAGS", "HLS", "build_shim", "include_path", "shim"]

HLS = Path(__file__).parents[4] / "hls"
"""The folder of headers and kernels of this checkout."""
CXX_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
"""No contraction: every operation is rounded, as in profile ieee. Subnormals are kept, as nothing sets -ffast-math."""

_SHIMS = Path(__file__).parents[1] / "shims"


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
    flags = [*CXX_FLAGS, *(f"-D{key}={value}" for key, value in (defines or {}).items())]
    return build_library(
        f"hls-{name}", source, "simulated HLS kernels", flags, files=files, folders=[*include, include_path()],
        users=include,
    )  # fmt: skip
