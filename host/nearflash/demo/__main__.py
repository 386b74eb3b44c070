"""`python -m nearflash.demo`: fine-tune doclm-7m, first on the simulated updater, then on the host's own.

The state lies in a real file, read and written by direct I/O. Each step is computed again with nearflash.model, and
every word of p, m, v and of the low-precision copy is compared. Exit status 1 where anything differs.
"""

import argparse
import sys
from pathlib import Path

from nearflash.abi.errors import NearflashError
from nearflash.demo.run import Demo

DATA = Path(__file__).parents[3] / "tests" / "data"


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when every check holds, 1 (and a line that says why) otherwise."""
    options = _parser().parse_args(arguments)
    try:
        failures = Demo(options).run().failures()
    except NearflashError as error:
        failures = [f"{type(error).__name__}: {error}"]
    for failure in failures:
        print(f"demo failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nearflash.demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DATA / "doclm-7m", help="transformers model folder")
    parser.add_argument("--text", type=Path, default=DATA / "finetune.txt", help="text to tune on")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="folder for state and results")
    parser.add_argument("--rtl-device", default="verilator:update-tiny", help="device of the first steps")
    parser.add_argument("--rtl-steps", type=int, default=5, help="steps on it")
    parser.add_argument("--host-device", default="host", help="device of the steps after those")
    parser.add_argument("--host-steps", type=int, default=15, help="steps on it")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate")
    parser.add_argument("--window", type=int, default=256, help="tokens in a window of text")
    parser.add_argument("--batch", type=int, default=4, help="windows in a batch")
    parser.add_argument("--no-waves", dest="waves", action="store_false", help="build no simulator with waves")
    return parser


if __name__ == "__main__":
    sys.exit(main())
