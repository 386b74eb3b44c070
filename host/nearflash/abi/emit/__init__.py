"""Everything generated from the contract: C and HLS headers, tables for readers, JSON for tools.

`outputs()` names each generated file (relative to the repository) and its text; `nearflash emit` writes them and a
test compares them.
"""

from collections.abc import Callable
from pathlib import Path

from nearflash.abi.emit import c, hls, json, markdown

__all__ = ["outputs", "write"]

_EMITTERS: dict[str, Callable[[], str]] = {
    "hls/include/nearflash_abi.h": c.header,
    "hls/include/nearflash_config.hpp": hls.header,
    "docs/contracts/registers.md": markdown.tables,
    "docs/contracts/abi.json": json.document,
}


def outputs() -> dict[str, str]:
    """Text of every generated file by path."""
    return {path: emit() for path, emit in _EMITTERS.items()}


def write(root: Path) -> list[str]:
    """Write what is not fresh below `root`; returns the paths that changed."""
    changed = []
    for path, text in outputs().items():
        target = root / path
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            changed.append(path)
    return changed
