"""The processor systems of Zynq parts, as IP of a block design: what a kernel's registers, memory and interrupt reach.

Source: AMD PG082 (Zynq-7000 processing system), PG201 (Zynq UltraScale+ processing system): interfaces, pins, options;
UG585 and UG1085: addresses of the general-purpose ports, clocks of the high-performance ports.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nearflash.abi.errors import ConfigError
from nearflash.device.bitstreams.board import Board

__all__ = ["PROCESSORS", "Processor", "has_processor", "processor_of"]


@dataclass(frozen=True)
class Processor:
    """Names of one processor system's parts."""

    vlnv: str
    options: Mapping[str, str | int]
    """CONFIG properties: ports, interrupt, the clock of the programmable logic."""
    bus_clock_hz: int
    """Clock 0 of the programmable logic: of the processor's ports, and what the kernel's clock is made from."""
    control: str
    """AXI master for registers."""
    control_clock: str
    control_address: int
    memory: str
    """AXI slave for memory."""
    memory_clock: str
    memory_segment: str
    clock: str
    reset_n: str
    interrupt: str
    external: tuple[str, ...]
    """Interfaces that become ports of the design."""


PROCESSORS = {
    "xc7z": Processor(
        vlnv="xilinx.com:ip:processing_system7:5.5",
        options={
            "PCW_USE_M_AXI_GP0": 1, "PCW_USE_S_AXI_HP0": 1, "PCW_S_AXI_HP0_DATA_WIDTH": 64,
            "PCW_USE_FABRIC_INTERRUPT": 1, "PCW_IRQ_F2P_INTR": 1, "PCW_FPGA0_PERIPHERAL_FREQMHZ": 150,
        },
        bus_clock_hz=150_000_000, control="M_AXI_GP0", control_clock="M_AXI_GP0_ACLK", control_address=0x4000_0000,
        memory="S_AXI_HP0", memory_clock="S_AXI_HP0_ACLK", memory_segment="S_AXI_HP0/HP0_DDR_LOWOCM",
        clock="FCLK_CLK0", reset_n="FCLK_RESET0_N", interrupt="IRQ_F2P", external=("DDR", "FIXED_IO"),
    ),
    "xczu": Processor(
        vlnv="xilinx.com:ip:zynq_ultra_ps_e:3.5",
        options={
            "PSU__USE__M_AXI_GP0": 1, "PSU__USE__M_AXI_GP1": 0, "PSU__USE__M_AXI_GP2": 0, "PSU__USE__S_AXI_GP2": 1,
            "PSU__SAXIGP2__DATA_WIDTH": 128, "PSU__USE__IRQ0": 1, "PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ": 150,
        },
        bus_clock_hz=150_000_000, control="M_AXI_HPM0_FPD", control_clock="maxihpm0_fpd_aclk",
        control_address=0xA000_0000, memory="S_AXI_HP0_FPD", memory_clock="saxihp0_fpd_aclk",
        memory_segment="SAXIGP2/HP0_DDR_LOW", clock="pl_clk0", reset_n="pl_resetn0", interrupt="pl_ps_irq0",
        external=(),
    ),
}  # fmt: skip
"""By the beginning of a part's name."""


def has_processor(board: Board) -> bool:
    """Whether the board's part has a processor system: then it gets a block design around its kernel."""
    return board.part.startswith(tuple(PROCESSORS))


def processor_of(board: Board) -> Processor:
    """The processor system of a board's part. Raises ConfigError for a part without one."""
    for prefix, processor in PROCESSORS.items():
        if board.part.startswith(prefix):
            return processor
    raise ConfigError(f"part of {board.name} must begin with {' or '.join(PROCESSORS)}, not {board.part!r}")
