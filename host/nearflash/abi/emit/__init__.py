"""Everything generated from the contract: C and HLS headers, tables for readers, JSON for tools.

`outputs()` names each generated file (relative to the repository) and its text; `nearflash emit` writes them and a
test compares them.
"""

from collections.abc import Callable

from nearflash.abi.emit import c, hls, json, markdown

__all__ = ["outputs"]

_EMITTERS: dict[str, Callable[[], str]] = {
    "hls/include/nearflash_abi.h": c.header,
    "hls/include/nearflash_config.hpp": hls.header,
    "docs/contracts/registers.md": markdown.tables,
    "docs/contracts/abi.json": json.document,
}


def outputs() -> dict[str, str]:
    """Text of every generated file by path."""
    return {path: emit() for path, emit in _EMITTERS.items()}
