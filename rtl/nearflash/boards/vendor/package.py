"""Everything that a vendor's tools need to build a board, in one folder: `build/bitstreams/<board>/`.

<kernel>.v, <kernel>.xdc, package_<kernel>.tcl     each kernel: Verilog, its clock, its packaging as IP
<kernel>.xml, connectivity.cfg                     boards with a Vitis platform
system.tcl, system.xdc, nand_phy.v                 Zynq boards: the block design, what stands for a NAND PHY

Of other boards without a platform the package has the kernels alone.
"""

from pathlib import Path

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import config
from nearflash.boards.vendor.absent_nand import AbsentNand
from nearflash.boards.vendor.block_design import block_design_tcl
from nearflash.boards.vendor.connectivity import connectivity
from nearflash.boards.vendor.constraints import kernel_xdc, system_xdc
from nearflash.boards.vendor.kernel import KernelDesign, convert_kernel, flatten
from nearflash.boards.vendor.kernel_xml import kernel_xml
from nearflash.boards.vendor.package_tcl import package_tcl
from nearflash.boards.vendor.processor import has_processor
from nearflash.device.bitstreams.board import Board
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["convert_board", "write_package"]


def convert_board(board: Board) -> list[KernelDesign]:
    """The kernels of a board, elaborated: minutes for large ones."""
    return [convert_kernel(config(name)) for name in board.kernels]


def write_package(board: Board, designs: list[KernelDesign], folder: Path, git_revision: int = 0) -> list[Path]:
    """Write the files of a board's package; returns their paths.

    git_revision : first 32 bits of the sources' revision, for the identity registers.

    Raises ConfigError for a board that the open flow builds, or a Zynq board with more than one kernel.
    """
    if board.flow not in ("vivado", "vitis"):
        raise ConfigError(f"flow of {board.name} must be vivado or vitis for a vendor's package, not {board.flow!r}")
    texts: dict[str, str] = {}
    for design in designs:
        texts[f"{design.top}.xdc"] = kernel_xdc(board, design)
        texts[f"package_{design.top}.tcl"] = package_tcl(board, design)
    if board.flow == "vitis":
        texts |= {f"{design.top}.xml": kernel_xml(design) for design in designs}
        texts["connectivity.cfg"] = connectivity(board, designs)
    elif has_processor(board):
        if len(designs) != 1:
            raise ConfigError(f"kernels of {board.name} must be one, not {len(designs)}: its block design has one")
        texts |= {"system.tcl": block_design_tcl(board, designs[0]), "system.xdc": system_xdc(designs[0])}
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [convert_kernel(design.build, git_revision) if git_revision else design for design in designs]
    verilog = [*kernels, *([flatten(AbsentNand(), "nand_phy")] if any(design.links for design in designs) else [])]
    for flat in verilog:
        flat.write_verilog(folder / f"{flat.top}.v")
    for name, text in texts.items():
        write_durably(folder / name, text, mode=PUBLIC_MODE)
    return sorted(folder / name for name in (*texts, *(f"{flat.top}.v" for flat in verilog)))
