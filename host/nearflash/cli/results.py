"""`nearflash results`: the figures that the project states, and the pages generated from them."""

import argparse
import sys
from pathlib import Path
from typing import Any

from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["results"]


def results(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "results",
        help="Keep the figures of docs/results: add a bench's output, update, write the pages, list what is old.",
        description="Keep the figures that the project states, and the pages that are generated from them.",
        epilog="example: nearflash bench update --json > rows.jsonl; "
        "nearflash results add rows.jsonl --page gateware --command 'nearflash bench update --json'",
    )
    parser.add_argument("--root", type=Path, default=Path(), help="The checkout to work in (default: this folder).")
    actions = parser.add_subparsers(metavar="action", required=True)
    add = actions.add_parser("add", help="Append the JSON lines of a bench to docs/results/data.")
    add.add_argument("file", type=Path, help="A file of JSON lines, as `nearflash bench NAME --json` prints them.")
    add.add_argument("--page", required=True, help="The page of docs/results that shows them, as in pages.toml.")
    add.add_argument("--command", required=True, help="The command that printed them.")
    add.add_argument("--rates", help="What the disk or the memory gave in the same run, for timings.")
    add.set_defaults(run=_add)
    update = actions.add_parser("update", help="Take the values of a command's figures from what it printed now.")
    update.add_argument("file", type=Path, help="A file of JSON lines, as `nearflash bench NAME --json` prints them.")
    update.add_argument("--command", required=True, help="The command that printed them, as the figures state it.")
    update.add_argument("--rates", help="What the disk or the memory gave in the same run, for timings.")
    update.set_defaults(run=_update)
    pages = actions.add_parser("pages", help="Write the pages of docs/results and README's table of figures.")
    pages.add_argument("--check", action="store_true", help="Write nothing; exit 1 and list the stale pages.")
    pages.set_defaults(run=_pages)
    stale = actions.add_parser(
        "stale", help="List figures that are older than the code that they are about, by git; exit 1 if there are any."
    )
    stale.set_defaults(run=_stale)


def _add(arguments: argparse.Namespace) -> int:
    from nearflash.bench.results import add_rows, read_objects

    rows = read_objects(arguments.file)
    for path in add_rows(arguments.root, rows, arguments.page, arguments.command, arguments.rates):
        print(path)
    return 0


def _update(arguments: argparse.Namespace) -> int:
    from nearflash.bench.remeasure import update_figures
    from nearflash.bench.results import read_objects

    rows = read_objects(arguments.file)
    for figure, before, now in update_figures(arguments.root, rows, arguments.command, arguments.rates):
        print(f"{figure}: {before:g} -> {now:g}")
    return 0


def _pages(arguments: argparse.Namespace) -> int:
    from nearflash.bench.results import outputs, stale_pages

    old = stale_pages(arguments.root)
    for path in old:
        print(path)
        if not arguments.check:
            write_durably(arguments.root / path, outputs(arguments.root)[path], mode=PUBLIC_MODE)
    if old and arguments.check:
        print("these pages are stale: run `nearflash results pages`", file=sys.stderr)
        return 1
    return 0


def _stale(arguments: argparse.Namespace) -> int:
    from nearflash.bench.stale import find_old_figures

    old = find_old_figures(arguments.root)
    for figures in old:
        print(figures)
    if old:
        count = sum(figures.count for figures in old)
        print(f"{count} figures are older than their code: measure them again before they are quoted", file=sys.stderr)
    return 1 if old else 0
