"""The command `nearflash state`: what the state files of an optimizer hold, and where else it can go."""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError, UncheckedWarning
from nearflash.support.arguments import Ineffective, counts, declare_ineffective, non_negative

if TYPE_CHECKING:
    from nearflash.storage.state.state_store import StateStore

__all__ = ["state"]

_EXAMPLES = """examples:
  nearflash state status /mnt/nvme/optimizer.state
  nearflash state export /mnt/nvme/optimizer.state --to state.safetensors
  nearflash state reshard /mnt/nvme/optimizer.state --to /mnt/a/state /mnt/b/state --stripe-ratio 2,1
  nearflash state delta /mnt/nvme/optimizer.state --since 10 --to /mnt/share/versions
  nearflash state patch model.safetensors --from /mnt/share/versions --to model-12.safetensors
"""


def state(subparsers: Any) -> None:
    """Register `nearflash state` with its actions."""
    parser = subparsers.add_parser("state", epilog=_EXAMPLES)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "status", _status, "Show step, tensors, arrays and files; no extent is read.")
    _add(actions, "verify", _verify, "Read everything; exit code 1 and a line for each extent that is damaged.")
    snapshot = _add(
        actions, "snapshot", _snapshot, "Copy the state files of the committed step, by reflinks where possible."
    )
    snapshot.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="Folder to write to; it is made if missing."
    )
    export = _add(
        actions, "export", _export, "Write parameters and moments to a safetensors file, under torch's names."
    )
    export.add_argument("--to", type=Path, required=True, metavar="FILE", help="Path of the new safetensors file.")
    delta = _add(actions, "delta", _delta, "Publish which weights changed since a step, as a patch of serving engines.")
    delta.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="Folder of versions, made if missing.")
    delta.add_argument(
        "--since",
        type=non_negative,
        metavar="STEP",
        help="Step to begin at; the folder's newest version, if it has one.",
    )
    patch = actions.add_parser("patch", help="Bring a safetensors file of weights to a published version.")
    patch.add_argument("file", type=Path, help="Weights of the version's base; it stays as it is.")
    patch.add_argument("--from", type=Path, required=True, metavar="FOLDER", dest="folder", help="Folder of versions.")
    patch.add_argument(
        "--version", type=non_negative, metavar="STEP", help="Version to apply; the newest unless given."
    )
    patch.add_argument("--to", type=Path, required=True, metavar="FILE", help="Path of the new safetensors file.")
    patch.set_defaults(run=_patch)
    imported = actions.add_parser("import", help="Make a new state from a safetensors file, as export writes it.")
    imported.add_argument(
        "file",
        type=Path,
        help="File of export, or of another origin: F32 tensors, with AdamW's moments if it has them.",
    )
    imported.add_argument("--profile", help="Operation order, for a file of another origin (default: ieee).")
    _add_target(imported, _import)
    other = _add(actions, "reshard", _reshard, "Stripe the same state over other files, or for other ranks.")
    other.add_argument(
        "--ranks", type=int, metavar="N", help="FILEs are of all ranks of a run: write N ranks' into the folder --to."
    )
    _add_target(other, _reshard)
    rule = "left out with --ranks: each rank has one file"
    declare_ineffective(other, Ineffective(("stripe_ratio",), lambda given: given.ranks is not None, rule))


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text)
    parser.add_argument("files", type=Path, nargs="+", help="All files of one state, in any order.")
    parser.add_argument(
        "--buffered", action="store_true", help="Use the page cache, for file systems without O_DIRECT."
    )
    parser.set_defaults(run=run)
    return parser


def _add_target(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--to", type=Path, nargs="+", required=True, metavar="FILE", help="New files, one a device.")
    parser.add_argument(
        "--stripe-ratio", type=counts, metavar="N,N", help="Extents of each file in a stripe, such as 2,1."
    )
    if run is _import:
        parser.add_argument(
            "--buffered", action="store_true", help="Use the page cache, for file systems without O_DIRECT."
        )
    parser.set_defaults(run=run)


def _open(arguments: argparse.Namespace) -> "StateStore":
    from nearflash.storage.state.state_store import StateStore

    return StateStore.open(arguments.files, direct=not arguments.buffered, writable=False)


def _status(arguments: argparse.Namespace) -> int:
    with _open(arguments) as store:
        _describe(store)
    return 0


def _describe(store: "StateStore") -> None:
    from nearflash.storage.state.status import StateStatus

    for line in StateStatus.of(store).lines():
        print(line)


def _verify(arguments: argparse.Namespace) -> int:
    with _open(arguments) as store:
        damage = store.verify()
        for message in damage:
            print(f"DAMAGED {message}")
        count = len(store.manifest.stored) * len(store.manifest.extents)
        print(f"step {store.steps}: {count - len(damage)} of {count} extents of arrays are valid")
    return 1 if damage else 0


def _snapshot(arguments: argparse.Namespace) -> int:
    with _open(arguments) as store:
        for path in store.snapshot(arguments.to):
            print(path)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from nearflash.storage.state.exchange import export_state

    with _open(arguments) as store:
        size_bytes = export_state(store, arguments.to)
        print(f"{arguments.to}: step {store.steps}, {len(store.manifest.tensors)} tensors, {size_bytes} bytes")
    return 0


def _delta(arguments: argparse.Namespace) -> int:
    from nearflash.storage.state.delta_log import read_deltas
    from nearflash.storage.state.weight_patch import newest_version, publish_patch

    since = arguments.since
    if since is None:
        since = (newest_version(arguments.to) if arguments.to.is_dir() else None) or 0
    with _open(arguments) as store:
        patch = publish_patch(read_deltas(store, since), arguments.to)
    print(f"{patch.path}: version {patch.version} from {patch.base_version}, {patch.size_bytes} bytes")
    return 0


def _patch(arguments: argparse.Namespace) -> int:
    from nearflash.abi.errors import StateError
    from nearflash.storage.state.weight_patch import WeightPatch, newest_version, patch_checkpoint

    version = newest_version(arguments.folder) if arguments.version is None else arguments.version
    if version is None:
        raise StateError(f"{arguments.folder} must have a published version, not none; see nearflash state delta")
    size_bytes = patch_checkpoint(WeightPatch.open(arguments.folder, version), arguments.file, arguments.to)
    print(f"{arguments.to}: version {version}, {size_bytes} bytes")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from nearflash.storage.state.exchange import import_state

    options = {"stripe_ratio": arguments.stripe_ratio, "profile": arguments.profile, "direct": not arguments.buffered}
    with warnings.catch_warnings(record=True, action="always", category=UncheckedWarning) as noticed:
        store = import_state(arguments.file, arguments.to, **options)
    for warning in noticed:
        print(f"warning: {warning.message}", file=sys.stderr)
    with store:
        _describe(store)
    return 0


def _reshard(arguments: argparse.Namespace) -> int:
    from nearflash.storage.state.exchange import reshard
    from nearflash.storage.state.ranks import reshard_offline

    if arguments.ranks is not None:
        if len(arguments.to) > 1:
            raise CommandError(f"--to must be one folder with --ranks, not {len(arguments.to)} files")
        for path in reshard_offline(arguments.files, arguments.to[0], arguments.ranks, direct=not arguments.buffered):
            print(path)
        return 0
    with _open(arguments) as store:
        with reshard(store, arguments.to, stripe_ratio=arguments.stripe_ratio, direct=not arguments.buffered) as other:
            _describe(other)
    return 0
