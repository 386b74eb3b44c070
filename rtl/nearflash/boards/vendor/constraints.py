"""XDC files: the clock of a kernel that is built alone, and what the timing analysis of a whole system leaves out.

In a system the clocks come from the processor's and the clock wizard's own constraints.
"""

from nearflash.boards.vendor.kernel import KernelDesign
from nearflash.boards.vendor.package_tcl import HEADER
from nearflash.device.bitstreams.board import Board

__all__ = ["kernel_xdc", "system_xdc"]


def kernel_xdc(board: Board, design: KernelDesign) -> str:
    """Constraints of the kernel alone, out of context."""
    return "\n".join([
        HEADER,
        f"# {design.build.full_name} at {board.clock_hz / 1e6:g} MHz",
        f"create_clock -name ap_clk -period {1e9 / board.clock_hz:.3f} [get_ports ap_clk]",
        "# The reset is held for many cycles and registered once inside.",
        "set_false_path -from [get_ports ap_rst_n]",
        "# Level-sensitive, read by software.",
        "set_false_path -to [get_ports interrupt]",
        "",
    ])  # fmt: skip


def system_xdc(design: KernelDesign) -> str:
    """Constraints of the block design around the kernel."""
    return "\n".join([
        HEADER,
        "# The processor samples the interrupt in a clock of its own, and it stays until software clears it.",
        f"set_false_path -through [get_pins -hierarchical -filter {{NAME =~ */{design.top}/interrupt}}]",
        "# Held for many cycles by the reset block, and registered once in the kernel.",
        f"set_false_path -through [get_pins -hierarchical -filter {{NAME =~ */{design.top}/ap_rst_n}}]",
        "",
    ])  # fmt: skip
