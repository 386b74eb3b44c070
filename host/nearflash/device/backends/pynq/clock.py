"""Whether the logic of a Zynq-7000 can answer: its clock, its reset and the shifters between it and the processors.

An AXI read of a port whose clock is off gets no answer, and the processor that waits for it hangs, with Linux, until
the board is switched off. So these registers, which are the processing system's own, are read first.

Source: AMD UG585, appendix B.28 (slcr). Linux gates FCLK0 by bit 0 of FPGA0_THR_CNT (drivers/clk/zynq/clkc.c).
"""

from collections.abc import Callable

from nearflash.abi.errors import DeviceError

__all__ = ["SLCR_ADDRESS", "SLCR_BYTES", "check_port", "fclk0_hz"]

SLCR_ADDRESS, SLCR_BYTES = 0xF800_0000, 0x1000
_PS_CLOCK_HZ = 50_000_000
"""Of the PYNQ-Z2's oscillator."""
_CLOCK, _GATE, _RESET, _SHIFTERS = 0x170, 0x178, 0x240, 0x900
_PLLS = (0x108, 0x108, 0x100, 0x104)
"""Control of the I/O, I/O, ARM and DDR PLL, by the clock's SRCSEL."""
_TOLERANCE = 0.01

Read = Callable[[int], int]


def fclk0_hz(read: Read) -> float:
    """Clock of the logic by the PLL's multiplier and both dividers, Hz; 0 where a divider is 0 or the PLL is off."""
    clock = read(_CLOCK)
    pll = read(_PLLS[clock >> 4 & 3])
    divider = (clock >> 8 & 0x3F) * (clock >> 20 & 0x3F)
    return 0.0 if pll & 3 or not divider else _PS_CLOCK_HZ * (pll >> 12 & 0x7F) / divider


def check_port(read: Read, clock_hz: int, register: str) -> None:
    """Raise DeviceError, naming the read that would hang, unless the logic's clock runs at `clock_hz`.

    read: of the 32-bit register at a byte offset from SLCR_ADDRESS. register: what is to be read first.
    """
    found = {
        "FCLK0's gate (FPGA0_THR_CNT)": (read(_GATE) & 1, 0),
        "the logic's reset (FPGA_RST_CTRL bit 0)": (read(_RESET) & 1, 0),
        "the level shifters (LVL_SHFTR_EN)": (read(_SHIFTERS) & 0xF, 0xF),
    }
    hangs = f"an AXI read of {register} would hang the processors until the board is switched off, so it was not read"
    for name, (value, wanted) in found.items():
        if value != wanted:
            raise DeviceError(f"{name} must be {wanted:#x}, not {value:#x}: {hangs}; load the bitstream again, or boot "
                              "PYNQ's image, whose device tree enables the clock")  # fmt: skip
    stated = fclk0_hz(read)
    if not stated:
        raise DeviceError(f"FCLK0 must have a PLL that runs and two dividers, not none: {hangs}; boot PYNQ's image")
    if abs(stated / clock_hz - 1) > _TOLERANCE:
        raise DeviceError(
            f"FCLK0 must be {clock_hz / 1e6:.2f} MHz, for which the bitstream was built, not {stated / 1e6:.2f} MHz: "
            "the image's I/O PLL is not at 1 GHz, or another program set the dividers; load the bitstream again"
        )
