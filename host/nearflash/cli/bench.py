"""`nearflash bench NAME`: a subcommand for each bench, with its own options.

A bench's module is imported when its subcommand parses its arguments; until then only its first line is read.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearflash.bench.options import add_options
from nearflash.bench.runner import bench_names, load_bench, measure, summary
from nearflash.cli.help import HelpFormatter

__all__ = ["add"]

_EXAMPLES = """examples:
  nearflash bench train --path /mnt/nvme
  nearflash bench attend --parts equality --json
  nearflash bench all --json > results.jsonl
"""
_ALL = "Every bench, one after the other."
_JSON = "Write one JSON object a line to standard output instead of text to standard error."


class _BenchParser(argparse.ArgumentParser):
    """The parser of one bench, whose options are added when they are needed."""

    bench: str | None = None

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if self.bench is not None:
            bench, self.bench = self.bench, None
            names = add_options(self, load_bench(bench))
            self.set_defaults(rows=lambda given: measure(bench, **{name: getattr(given, name) for name in names}))
        return super().parse_known_args(args, namespace)


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("bench", epilog=_EXAMPLES)
    benches = parser.add_subparsers(metavar="NAME", required=True, parser_class=_BenchParser)
    every = benches.add_parser("all", help=_ALL, description=_ALL)
    every.add_argument("--path", type=Path, metavar="FOLDER", help="Measure the disk of this folder.")
    every.set_defaults(rows=lambda given: measure("all", path=given.path))
    for name in bench_names():
        bench = benches.add_parser(name, help=summary(name), description=summary(name), formatter_class=HelpFormatter)
        bench.bench = name
    for bench in benches.choices.values():
        bench.add_argument("--json", action="store_true", help=_JSON)
