"""The `nearflash` command.

Other packages add commands through the entry-point group `nearflash.command`: name -> `module:function`, where
`function(subparsers)` adds a parser whose default `run` takes the parsed arguments and returns the exit code; or one
with an option `--json`, whose default `rows` takes the parsed arguments and yields dicts, printed as a bench's are.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from nearflash import abi
from nearflash.abi.config import CONFIGS
from nearflash.abi.errors import CommandError, ConfigError, NearflashError
from nearflash.bench.runner import bench_names, measure, print_rows, with_origin

__all__ = ["main"]

GROUP = "nearflash.command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 a check failed, 2 an error that the message explains."""
    parser = argparse.ArgumentParser("nearflash", description="Near-storage computing for large language models.")
    parser.add_argument(
        "--version", action="version", version=f"nearflash {version('nearflash')}, abi {abi.ABI_VERSION}"
    )
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for add in (_add_devices, _add_selftest, _add_emit, _add_bench):
        add(subparsers)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            point.load()(subparsers)
        except ImportError as missing:
            _add_missing(subparsers, point.name, missing)
    arguments = parser.parse_args(argv)
    try:
        if hasattr(arguments, "rows"):
            rows = map(with_origin, arguments.rows(arguments))
            return 1 if print_rows(rows, as_json=arguments.json) else 0
        return int(arguments.run(arguments) or 0)
    except NearflashError as error:
        print(f"nearflash: {error}", file=sys.stderr)
        return 2


def _add_missing(subparsers: Any, name: str, missing: ImportError) -> None:
    reason = f"needs the package {missing.name!r}; pip install 'nearflash[dev]'"

    def run(_: argparse.Namespace) -> int:
        raise CommandError(f"command {name!r} {reason}")

    parser = subparsers.add_parser(name, help=reason)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _add_devices(subparsers: Any) -> None:
    parser = subparsers.add_parser("devices", help="list devices and whether they can be opened here")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="instead: GB/s of direct I/O there (256 MiB)")
    parser.set_defaults(run=_devices)


def _devices(arguments: argparse.Namespace) -> int:
    if arguments.measure:
        from nearflash.storage.io.measure import measure_drive, report

        for line in report(measure_drive(arguments.measure)):
            print(line)
        return 0
    from nearflash.device.registry import available_devices, device_class, open_device

    for spec in available_devices():
        config = CONFIGS[spec.partition(":")[2]]
        build = f"{config.port_bits:>3}-bit ports  digest {config.digest64:016x}"
        try:
            if device_class(spec).QUICK_TO_OPEN:
                open_device(spec).close()
                state = "opens here"
            else:
                state = "installed"
        except NearflashError as error:
            state = f"not here: {error}"
        print(f"{spec:<27}{build}  {state}")
    return 0


def _add_selftest(subparsers: Any) -> None:
    parser = subparsers.add_parser("selftest", help="compare random commands on a device with the model")
    parser.add_argument("--device", default="host:update-smartssd", help="for example verilator:attend-tiny")
    parser.add_argument("--params", type=int, default=1000, help="parameters of each update")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens times query heads of each head of attention")
    parser.add_argument("--columns", type=int, default=1000, help="columns of each matrix of weights")
    parser.add_argument("--seed", type=int, default=1, help="of the random values")
    parser.add_argument("--record", metavar="FILE", help="write a transcript that device `replay` plays back")
    parser.set_defaults(run=_selftest)


def _selftest(arguments: argparse.Namespace) -> int:
    from nearflash.device import open_device
    from nearflash.device.replay import RecordingDevice
    from nearflash.device.selftest.run import compare

    words = mismatches = 0
    device = open_device(arguments.device)
    with RecordingDevice(device, arguments.record) if arguments.record else device as device:
        sizes = {name: getattr(arguments, name) for name in ("params", "tokens", "columns")}
        for result in compare(device, seed=arguments.seed, **sizes):
            print(f"{result.case:<28}{result.words:>8} words {result.mismatches:>6} mismatches")
            words, mismatches = words + result.words, mismatches + result.mismatches
    print(f"{arguments.device}: {words} words compared with the model, {mismatches} mismatches")
    return 1 if mismatches else 0


def _add_emit(subparsers: Any) -> None:
    parser = subparsers.add_parser("emit", help="write the generated headers and tables of this checkout afresh")
    parser.set_defaults(run=_emit)


def _emit(_: argparse.Namespace) -> int:
    from nearflash.abi import emit

    root = Path(abi.__file__).resolve().parents[3]
    if not (root / "pyproject.toml").exists():
        raise ConfigError(f"emit must run in a checkout of nearflash, not from the package in {root}")
    for path in emit.write(root):
        print(path)
    return 0


def _add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure: one JSON object a line with --json")
    parser.add_argument("name", help=f"one of {', '.join(['all', *bench_names()])}")
    parser.add_argument("--json", action="store_true", help="JSON on standard output, else text on standard error")
    parser.add_argument("--parts", type=lambda names: names.split(","), help="of bench attend, as errors,flash")
    parser.add_argument("--mode", help="of bench accuracy, as sparf-page: its recommended setting; a size of train")
    parser.add_argument("--path", type=Path, help="folder on the disk to be measured, of bench train")
    parser.add_argument("--texts", type=Path, nargs="+", help="of bench accuracy: UTF-8 files of 4,096 tokens or more")
    parser.add_argument("--gradients", nargs="+", help="of bench update: fp32, or topk:SHARE, as topk:0.01")
    parser.add_argument("--state-formats", nargs="+", help="of bench update: some of fp32, bf16, mx8")
    options = ("parts", "mode", "path", "texts", "gradients", "state_formats")
    parser.set_defaults(
        rows=lambda arguments: measure(arguments.name, **{option: getattr(arguments, option) for option in options})
    )
