"""`python -m nearflash.demo`: the command `nearflash demo` by its module."""

import argparse
import sys

from nearflash.demo.cli import add_options, run


def main(arguments: list[str] | None = None) -> int:
    """Run the demo with the options of `nearflash demo`; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m nearflash.demo")
    add_options(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
