"""`nearflash device-server`: a board's end of a device that another machine drives over ssh."""

import argparse
import os
import sys
from typing import Any

__all__ = ["add"]

_EXAMPLES = """examples (ssh runs it for a device that is named with its machine):
  nearflash device-server pynq:update-pynq-z2
  nearflash selftest --device pynq:update-pynq-z2@xilinx@pynq
"""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("device-server", epilog=_EXAMPLES)
    parser.add_argument("device", help="Drive this device, as frames on standard input ask, and answer on the output.")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from nearflash.abi.errors import UnknownDeviceError
    from nearflash.abi.kernel.config import CONFIGS
    from nearflash.device.backends.remote.channel import FrameChannel
    from nearflash.device.backends.remote.server import serve
    from nearflash.device.registers import RegisterDevice
    from nearflash.device.registry import full_name, open_device

    name = full_name(arguments.device)

    def open_it() -> RegisterDevice:
        device = open_device(name)
        if not isinstance(device, RegisterDevice):
            device.close()
            raise UnknownDeviceError(f"a device that is served must have a kernel's registers, which {name} has not")
        return device

    # What a library prints must not come between frames.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        config = CONFIGS[name.partition("@")[0].partition(":")[2]]
        serve(FrameChannel(sys.stdin.buffer, output, "the machine that asks"), config, open_it)
    return 0
