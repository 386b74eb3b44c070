"""`nearflash emit`: the generated files of a checkout; a kernel's Verilog for other people's designs."""

import argparse
from pathlib import Path
from typing import Any

from nearflash import abi
from nearflash.abi.errors import CommandError, ConfigError
from nearflash.abi.kernel.config import config_of
from nearflash.cli.bitstream import load_function
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["add", "write_outputs"]

_EXAMPLES = """examples:
  nearflash emit && git diff --stat
  nearflash emit verilog update --config tiny -o hdl/update
"""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("emit", epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    actions = parser.add_subparsers(metavar="action")
    text = "Write a kernel's Verilog, its registers for C and as JSON, and its FuseSoC core."
    verilog = actions.add_parser("verilog", help=text, description=text)
    verilog.add_argument("kernel", help="Kernel: update, attend or expand.")
    verilog.add_argument("--config", default="tiny", help="Build configuration of the kernel, as tiny.")
    verilog.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="Folder for the files.")
    verilog.set_defaults(run=_emit_verilog)


def _run(_: argparse.Namespace) -> int:
    root = Path(abi.__file__).resolve().parents[3]
    if not (root / "pyproject.toml").exists():
        raise ConfigError(f"emit must run in a checkout of nearflash, not from the package in {root}")
    for path in write_outputs(root):
        print(path)
    return 0


def _emit_verilog(arguments: argparse.Namespace) -> int:
    build = config_of(arguments.kernel, arguments.config)
    if arguments.output.exists() and not arguments.output.is_dir():
        raise CommandError(f"output must be a folder, not the file {str(arguments.output)!r}")
    for path in load_function("verilog", "emit")(build.full_name, arguments.output):
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
