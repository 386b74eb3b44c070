"""`nearflash bitstream build`: a board's bitstreams by its flow, as far as this machine has the tools.

The open flow gives a bitstream of one kernel. For vendor flows the package is written in any case; then the vendor's
tools build it where they are installed.
"""

import subprocess
from collections.abc import Iterator

from nearflash.abi.errors import BitstreamError
from nearflash.abi.kernel.config import config
from nearflash.boards.design.revision import revision_of
from nearflash.boards.open.build import build as build_open
from nearflash.boards.vendor.package import convert_board, write_package
from nearflash.boards.vendor.processor import has_processor
from nearflash.boards.vendor.tools import keep_bitstream, keep_xclbin, run_tools
from nearflash.device.bitstreams import Board, BuildManifest, bitstreams_root

__all__ = ["build_board"]


def build_board(board: Board, kernel: str | None = None, *, package_only: bool = False) -> Iterator[str]:
    """Lines about what was made, as it is made. `kernel` is for the open flow, which builds one at a time.

    Raises ConfigError for a kernel that the board does not have, ToolsError or BitstreamError where tools are missing
    or fail: the message states which, and where the package is;
    BitstreamError too for a bitstream of the open flow beyond the board's limits.
    """
    if kernel is not None:
        board.build(kernel)
    if board.flow == "open":
        for name in [kernel] if kernel else [config(each).kernel for each in board.kernels]:
            made = build_open(board, name, bitstreams_root().parent / "build" / "boards" / board.name / name)
            yield _figures(board, made)
            made.check_limits(board)
        return
    work = bitstreams_root().parent / "build" / "bitstreams" / board.name
    designs = convert_board(board)
    revision = revision_of(board, designs[0].top, designs[0].digest)
    for path in write_package(board, designs, work, int(revision[:8], 16)):
        yield str(path)
    if package_only:
        return
    if board.flow == "vivado" and not has_processor(board):
        raise BitstreamError(
            f"{board.name} must have a design around its kernel for a bitstream, and has none yet: "
            f"{board.folder}/README.md states what is missing; the kernel's package is in {work}"
        )
    run_tools(board, designs, work)
    tools = {"vivado": tool_version("vivado")}
    if board.flow == "vivado":
        manifest = keep_bitstream(board, designs[0], work, revision, tools)
        yield f"{manifest.config}: {manifest.fmax_hz / 1e6:.1f} MHz, in {board.folder}"
    else:
        keep_xclbin(board, designs, work, revision, tools | {"v++": tool_version("v++")})
        yield f"{', '.join(design.build.full_name for design in designs)}: in {board.folder}"


def _figures(board: Board, made: BuildManifest) -> str:
    cells = made.utilisation
    speed = f"Fmax {made.fmax_hz / 1e6:.1f} MHz, runs at {made.clock_hz / 1e6:.1f} MHz"
    area = f"{cells.lut} LUT, {cells.ff} FF, {cells.dsp} DSP, {cells.bram36:g} BRAM36"
    return f"{board.name}/{made.kernel}: {speed}; {area}; 0 bits differ"


def tool_version(program: str) -> str:
    """The first line with a digit that a vendor's program prints for its version."""
    option = "-version" if program == "vivado" else "--version"
    done = subprocess.run([program, option], capture_output=True, text=True, check=False)
    lines = (line.strip() for line in done.stdout.splitlines())
    return next((line for line in lines if any(map(str.isdigit, line))), "unknown")
