"""`nearflash emit`: the generated files of a checkout."""

import argparse
from pathlib import Path
from typing import Any

from nearflash import abi
from nearflash.abi.errors import ConfigError

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("emit", epilog="example:\n  nearflash emit && git diff --stat\n")
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    from nearflash.abi import emit

    root = Path(abi.__file__).resolve().parents[3]
    if not (root / "pyproject.toml").exists():
        raise ConfigError(f"emit must run in a checkout of nearflash, not from the package in {root}")
    for path in emit.write(root):
        print(path)
    return 0
