"""`nearflash selftest`: a device against the reference model."""

import argparse
from pathlib import Path
from typing import Any

from nearflash.support.arguments import Ineffective, declare_ineffective

__all__ = ["add"]

_EXAMPLES = """examples:
  nearflash selftest --device verilator
  nearflash selftest --device verilator --kernel attend
  nearflash selftest --device host:expand-tiny --columns 512 --record run.jsonl
  nearflash selftest --device pynq:expand-pynq-z2 --record board.jsonl
"""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("selftest", epilog=_EXAMPLES)
    parser.add_argument(
        "--device", default="host", help="Test this device: a backend, or a name of `nearflash devices`."
    )
    parser.add_argument(
        "--kernel", choices=("update", "attend", "expand"),
        help="Test this kernel where --device is a backend alone (default: update).",
    )  # fmt: skip
    parser.add_argument("--params", type=int, default=1000, help="Parameters of each update.")
    parser.add_argument("--tokens", type=int, default=1000, help="Tokens times query heads of each head of attention.")
    parser.add_argument("--columns", type=int, default=1000, help="Columns of each matrix of weights.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the random values.")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="Write a transcript that the device `replay` plays back."
    )
    parser.set_defaults(run=_run)
    sizes = {"params": "update", "tokens": "attend", "columns": "expand"}
    declare_ineffective(parser, *(_size_of(name, kernel) for name, kernel in sizes.items()))


def _size_of(name: str, kernel: str) -> Ineffective:
    """The rule of a size that commands of one kernel have."""
    return Ineffective(
        (name,), lambda given: _kernel(given) != kernel, f"left out but for a kernel {kernel}, which has them"
    )


def _kernel(given: argparse.Namespace) -> str:
    return str(given.device.partition(":")[2].partition("-")[0] or given.kernel or "update")


def _run(arguments: argparse.Namespace) -> int:
    from nearflash.device import open_device
    from nearflash.device.replay import RecordingDevice
    from nearflash.device.selftest.bringup import bring_up
    from nearflash.device.selftest.run import compare

    words = mismatches = 0
    kernel = arguments.kernel or (None if ":" in arguments.device else "update")
    opened = open_device(arguments.device, kernel)
    try:
        recorded = RecordingDevice(opened, arguments.record) if arguments.record else opened
    except BaseException:
        opened.close()
        raise
    with recorded as device:
        sizes = {name: getattr(arguments, name) for name in ("params", "tokens", "columns", "seed")}
        for stage in bring_up(device, opened, **sizes):
            print(f"{stage.name:<16}{'ok' if stage.passed else 'FAILED'}: {stage.found}", flush=True)
            if not stage.passed:
                return 1
        for result in compare(device, **sizes):
            print(f"{result.case:<28}{result.words:>8} words {result.mismatches:>6} mismatches")
            words, mismatches = words + result.words, mismatches + result.mismatches
    print(f"{device.identity.name}: {words} words compared with the model, {mismatches} mismatches")
    return 1 if mismatches else 0
