"""The command `nearflash kv`: what a KV store's file holds."""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["kv"]

_EXAMPLES = """examples:
  nearflash kv status /mnt/nvme/kv
  nearflash kv verify /mnt/nvme/kv --heads
"""


def kv(subparsers: Any) -> None:
    """Register `nearflash kv verify FILE` and `nearflash kv status FILE`."""
    parser = subparsers.add_parser("kv", epilog=_EXAMPLES)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        ("verify", _verify, "Read every page: valid, erased or torn; exit code 1 where one is torn."),
        ("status", _status, "Show shape, layout and counts of pages, from the records alone."),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("file", type=Path, help="File that a KV store has closed, or left in a crash.")
        action.add_argument(
            "--buffered", action="store_true", help="Read through the page cache, for file systems without O_DIRECT."
        )
        if run is _verify:
            action.add_argument("--heads", action="store_true", help="Print a line for each layer and head.")
        action.set_defaults(run=run)


def _verify(arguments: argparse.Namespace) -> int:
    from nearflash.storage.kv.verify import verify

    report = verify(arguments.file, direct=not arguments.buffered)
    if report.kept is None:
        for sequence, tokens, most in report.sequences():
            print(f"sequence {sequence}: {tokens} tokens valid in every layer and head, up to {most} in some")
    else:
        for sequence, tokens in report.kept.items():
            print(f"sequence {sequence}: {tokens} tokens, valid in every layer and head")
    for (sequence, layer, head), pages in report.heads.items() if arguments.heads else ():
        tokens, indexed = pages.tokens(report.layout), pages.count_indexed(report.layout, report.shape.dim)
        print(f"sequence {sequence}, layer {layer}, head {head}: {tokens} tokens valid, {indexed} indexed")
    for torn in report.torn:
        print(f"TORN {torn}")
    print(f"{arguments.file}: {report.valid} pages valid, {report.erased} erased, {len(report.torn)} torn")
    return 1 if report.torn else 0


def _status(arguments: argparse.Namespace) -> int:
    import numpy as np

    from nearflash.storage.flash.file import KEPT, FileFlash
    from nearflash.storage.kv.kept import read_kept_sequences
    from nearflash.storage.kv.layout import read_label

    with FileFlash.open(arguments.file, direct=not arguments.buffered) as flash:
        shape, layout = read_label(flash.about)
        geometry = flash.geometry
        _, _, erased = flash.headers(np.arange(geometry.pages))
        sequences = read_kept_sequences(flash) if KEPT in flash.about else {}
    print(f"{shape}\n{layout}\n{geometry}")
    for sequence, tokens in sequences.items():
        print(f"sequence {sequence}: {tokens} tokens")
    print(f"{arguments.file}: {geometry.pages} pages, {int((~erased).sum())} programmed, {int(erased.sum())} erased")
    return 0
