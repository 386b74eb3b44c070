"""`python -m nearflash.boards.open BOARD [KERNEL ...]`: build bitstreams, or exit with code 2 and the reason."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nearflash.abi.config import config
from nearflash.abi.errors import NearflashError
from nearflash.boards.open.build import build
from nearflash.device.bitstreams import bitstreams_root, load_board

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Build the kernels named, or all of the board's; what comes between lies in build/boards/<board>/<kernel>."""
    parser = argparse.ArgumentParser(prog="python -m nearflash.boards.open", description="Build bitstreams.")
    parser.add_argument("board", help="Board of the flow open, for example pynq-z2.")
    parser.add_argument("kernels", nargs="*", help="Kernels; by default all that the board has.")
    options = parser.parse_args(argv)
    try:
        board = load_board(options.board)
        for kernel in options.kernels or [config(name).kernel for name in board.kernels]:
            board.build(kernel)
            work: Path = bitstreams_root().parent / "build" / "boards" / board.name / kernel
            made = build(board, kernel, work)
            cells = made.utilisation
            speed = f"{made.fmax_hz / 1e6:.1f} MHz, runs at {made.clock_hz / 1e6:.1f} MHz"
            area = f"{cells.lut} LUT, {cells.ff} FF, {cells.dsp} DSP, {cells.bram36:g} BRAM36"
            print(f"{board.name}/{kernel}: {speed}; {area}; 0 bits differ")
            made.check_limits(board)
    except NearflashError as error:
        print(f"nearflash: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
