"""`nearflash devices`: which devices there are, and the rates of a drive."""

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.python310 import UTC
from nearflash.support.arguments import Ineffective, declare_ineffective

__all__ = ["add"]

_EXAMPLES = """examples:
  nearflash devices
  nearflash devices --kernel attend
  nearflash devices --measure /mnt/nvme
"""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("devices", epilog=_EXAMPLES)
    kernels = sorted({build.kernel for build in CONFIGS.values()})
    parser.add_argument("--kernel", choices=kernels, help="List only devices of this kernel.")
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FOLDER",
        help="Measure direct I/O in this folder instead, with 256 MiB, and keep the rates: generate estimates by them.",
    )
    parser.set_defaults(run=_run)
    declare_ineffective(
        parser, Ineffective(("kernel",), lambda given: given.measure, "left out with --measure, which lists nothing")
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.measure:
        from nearflash.storage.io.measure import measure_drive, measure_random, report
        from nearflash.storage.io.profile import keep_profile
        from nearflash.storage.io.queue import usable_queues

        queues = [name for name, missing in usable_queues().items() if not missing]
        rates = [*measure_drive(arguments.measure), *measure_random(arguments.measure, queues=queues)]
        for line in report(rates):
            print(line)
        today = datetime.now(UTC).date().isoformat()
        print(f"kept in {keep_profile(arguments.measure, rates, today)}")
        return 0
    from nearflash.device.registry import available_devices, device_class, open_device

    for spec in available_devices(arguments.kernel):
        config = CONFIGS[spec.partition(":")[2]]
        build = f"{config.port_bits:>3}-bit ports  digest {config.digest64:016x}"
        try:
            if device_class(spec).QUICK_TO_OPEN:
                open_device(spec).close()
                state = "opens here"
            else:
                state = device_class(spec).presence()
        except NearflashError as error:
            state = f"not here: {error}"
        print(f"{spec:<27}{build}  {state}")
    return 0
