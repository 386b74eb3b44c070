"""`nearflash emit`: the generated files of a checkout."""

import argparse
from pathlib import Path
from typing import Any

from nearflash import abi
from nearflash.abi.errors import ConfigError
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["add", "write_outputs"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("emit", epilog="example:\n  nearflash emit && git diff --stat\n")
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    root = Path(abi.__file__).resolve().parents[3]
    if not (root / "pyproject.toml").exists():
        raise ConfigError(f"emit must run in a checkout of nearflash, not from the package in {root}")
    for path in write_outputs(root):
        print(path)
    return 0


def write_outputs(root: Path) -> list[str]:
    """Write what is not fresh below `root`; returns the paths that changed."""
    from nearflash.abi.emit import outputs

    changed = []
    for path, text in outputs().items():
        target = root / path
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(target, text, mode=PUBLIC_MODE)
            changed.append(path)
    return changed
