"""The command `nearflash kv`: what the file of a KV store, or of a block store, holds."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import StateError
from nearflash.support.arguments import Ineffective, declare_ineffective

if TYPE_CHECKING:
    from nearflash.storage.blocks.block_file import BlockFile

__all__ = ["kv"]

_EXAMPLES = """examples:
  nearflash kv status /mnt/nvme/kv
  nearflash kv verify /mnt/nvme/kv --heads
  nearflash kv status /mnt/nvme/tier --json
"""
_BLOCKS, _FLASH = "blocks", "flash"
"""Kinds of files that there are."""


def kv(subparsers: Any) -> None:
    """Register `nearflash kv verify PATH` and `nearflash kv status PATH`."""
    parser = subparsers.add_parser("kv", epilog=_EXAMPLES)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        (
            "verify",
            _verify,
            "Read every page or block: valid, erased or torn; exit code 1 where one is damaged.",
        ),
        ("status", _status, "Show shape, layout, counts and wear, from the records alone."),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "files", type=Path, nargs="+", metavar="PATH",
            help="File that a KV store has closed, or left in a crash; file of a block store, also while it is used; "
            "or a folder of them.",
        )  # fmt: skip
        action.add_argument(
            "--buffered", action="store_true", help="Read through the page cache, for file systems without O_DIRECT."
        )
        action.add_argument("--json", action="store_true", help="Print one JSON object a file.")
        if run is _verify:
            action.add_argument("--heads", action="store_true", help="Print a line for each layer and head.")
            rule = "left out with --json, which prints one object a file"
            declare_ineffective(action, Ineffective(("heads",), lambda given: given.json, rule))
        action.set_defaults(run=run)


def _verify(arguments: argparse.Namespace) -> int:
    results = [
        (_verify_blocks if kind == _BLOCKS else _verify_pages)(path, arguments)
        for path, kind in _files(arguments.files)
    ]
    return 0 if all(results) else 1


def _status(arguments: argparse.Namespace) -> int:
    for path, kind in _files(arguments.files):
        (_show_blocks if kind == _BLOCKS else _show_pages)(path, arguments)
    return 0


def _files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Files, of folders those that are of a store, and their kinds. Raises StateError for a folder without any."""
    from nearflash.storage.io.sealed import read_kind

    found: list[tuple[Path, str]] = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        kinds = [(one, read_kind(one)) for one in inside]
        files = [(one, kind) for one, kind in kinds if kind in (_BLOCKS, _FLASH)] if path.is_dir() else kinds
        if not files:
            raise StateError(f"{path} must have a file of a KV store or of a block store: give another folder")
        found += files
    return found


def _open_blocks(path: Path, arguments: argparse.Namespace) -> "BlockFile":
    from nearflash.storage.blocks.block_file import BlockFile

    return BlockFile.open_existing(path, direct=not arguments.buffered, writable=False)


def _verify_blocks(path: Path, arguments: argparse.Namespace) -> bool:
    from nearflash.storage.blocks.verify import verify_blocks

    with _open_blocks(path, arguments) as blocks:
        found = verify_blocks(blocks)
    if arguments.json:
        _print_json(path, _BLOCKS, valid=found.valid, changed=found.changed, damaged=found.damaged)
        return not found.damaged
    for damaged in found.damaged:
        print(f"DAMAGED {damaged}")
    changed = f", {found.changed} replaced meanwhile" if found.changed else ""
    print(f"{path}: {found.valid} blocks valid, {len(found.damaged)} damaged{changed}")
    return not found.damaged


def _show_blocks(path: Path, arguments: argparse.Namespace) -> None:
    from nearflash.storage.blocks.status import BlockStatus

    with _open_blocks(path, arguments) as blocks:
        status = BlockStatus.of(blocks)
    if arguments.json:
        _print_json(path, _BLOCKS, **status.as_json())
        return
    print(f"{path}: a block store")
    for line in status.lines():
        print(line)


def _verify_pages(path: Path, arguments: argparse.Namespace) -> bool:
    from nearflash.storage.kv.verify import verify

    report = verify(path, direct=not arguments.buffered)
    if arguments.json:
        _print_json(path, _FLASH, valid=report.valid, erased=report.erased, torn=report.torn, sequences=report.tokens())
        return not report.torn
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
    print(f"{path}: {report.valid} pages valid, {report.erased} erased, {len(report.torn)} torn")
    return not report.torn


def _show_pages(path: Path, arguments: argparse.Namespace) -> None:
    import numpy as np

    from nearflash.storage.flash.file import KEPT, FileFlash
    from nearflash.storage.kv.kept import read_kept_sequences
    from nearflash.storage.kv.layout import read_label

    with FileFlash.open(path, direct=not arguments.buffered, writable=False) as flash:
        shape, layout = read_label(flash.about)
        geometry = flash.geometry
        _, _, erased = flash.headers(np.arange(geometry.pages))
        sequences = read_kept_sequences(flash) if KEPT in flash.about else {}
    programmed = int((~erased).sum())
    if arguments.json:
        _print_json(path, _FLASH, pages=geometry.pages, programmed=programmed, page_bytes=geometry.page_bytes,
                    layers=shape.layers, kv_heads=shape.kv_heads, dim=shape.dim, sequences=sequences)  # fmt: skip
        return
    print(f"{shape}\n{layout}\n{geometry}")
    for sequence, tokens in sequences.items():
        print(f"sequence {sequence}: {tokens} tokens")
    print(f"{path}: {geometry.pages} pages, {programmed} programmed, {geometry.pages - programmed} erased")


def _print_json(path: Path, kind: str, **fields: Any) -> None:
    print(json.dumps({"path": str(path), "kind": kind} | fields))
