"""The command `nearflash demo`: fine-tune doclm-7m, first on the simulated updater, then on the host's own.

The state lies in a real file, read and written by direct I/O. Each step is computed again with nearflash.model, and
every word of p, m, v and of the low-precision copy is compared. Exit status 1 where anything differs.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError
from nearflash.support.arguments import non_negative, positive, rate

__all__ = ["add_options", "demo", "run"]

DATA = Path(__file__).parents[3] / "tests" / "data"
_EXAMPLES = """examples:
  nearflash demo
  nearflash demo --rtl-steps 1 --host-steps 3 --no-waves --output /mnt/nvme/demo
"""


def demo(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    for package in ("torch", "transformers", "matplotlib", "tqdm"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser = subparsers.add_parser("demo", description=__doc__.partition(": ")[2], epilog=_EXAMPLES)
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    parser.add_argument("--model", type=Path, default=DATA / "doclm-7m", metavar="FOLDER", help="Model to fine-tune.")
    parser.add_argument("--text", type=Path, default=DATA / "finetune.txt", metavar="FILE", help="Text to train on.")
    parser.add_argument(
        "--output", type=Path, default=Path("build/demo"), metavar="FOLDER", help="Where state and results go."
    )
    parser.add_argument("--rtl-device", default="verilator:update-tiny", help="Device of the first steps.")
    parser.add_argument("--rtl-steps", type=non_negative, default=3, help="Number of first steps.")
    parser.add_argument("--host-device", default="host", help="Device of the remaining steps.")
    parser.add_argument("--host-steps", type=non_negative, default=17, help="Number of remaining steps.")
    parser.add_argument("--lr", type=rate, default=5e-4, help="Learning rate.")
    parser.add_argument("--window", type=positive, default=256, help="Tokens in a window of text.")
    parser.add_argument("--batch", type=positive, default=4, help="Windows in a batch.")
    parser.add_argument("--no-waves", dest="waves", action="store_false", help="Build no simulator with waves.")


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 when every check holds, 1 (and a line that states why) otherwise."""
    from nearflash.demo.run import Demo

    try:
        failures = Demo(options).run().failures()
    except NearflashError as error:
        failures = [f"{type(error).__name__}: {error}"]
    for failure in failures:
        print(f"demo failed: {failure}", file=sys.stderr)
    return 1 if failures else 0
