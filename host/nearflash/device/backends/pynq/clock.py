"""Whether the logic of a Zynq-7000 can answer: its clock, its reset and the shifters between it and the processors.

An AXI read of a port whose clock is off gets no answer, and the processor that waits for it hangs, with Linux, until
the board is switched off. So these registers, which are the processing system's own, are read first.

Source: AMD UG585, appendix B.28 (slcr). Linux gates FCLK0 by bit 0 of FPGA0_THR_CNT (drivers/clk/zynq/clkc.c).
"""

from collections.abc import Callable
from pathlib import Path

from nearflash.abi.errors import DeviceError

__all__ = ["SLCR_ADDRESS", "SLCR_BYTES", "check_part", "check_port", "fclk0_hz", "find_crystal_hz", "set_clock"]

SLCR_ADDRESS, SLCR_BYTES = 0xF800_0000, 0x1000
_PS_CLOCK_HZ = 50_000_000
"""Of the oscillator of the PYNQ-Z2, the PYNQ-Z1 and the Arty Z7; others have 33.3 MHz."""
_CRYSTAL = "*/slcr@f8000000/clkc@100/ps-clk-frequency"
_CLOCK, _GATE, _RESET, _SHIFTERS = 0x170, 0x178, 0x240, 0x900
_PART, _LOCK, _UNLOCK = 0x530, (0x004, 0x767B), (0x008, 0xDF0D)
_DIVIDER_MAX = 63
_PLLS = (0x108, 0x108, 0x100, 0x104)
"""Control of the I/O, I/O, ARM and DDR PLL, by the clock's SRCSEL."""
_TOLERANCE = 0.01

Read = Callable[[int], int]
Write = Callable[[int, int], None]


def find_crystal_hz(tree: Path = Path("/proc/device-tree")) -> int:
    """Frequency of the board's oscillator, Hz: the device tree's, else the PYNQ-Z2's."""
    found = next(iter(sorted(tree.glob(_CRYSTAL))), None)
    return _PS_CLOCK_HZ if found is None else int.from_bytes(found.read_bytes(), "big")


def check_part(read: Read, code: int | None, what: str) -> None:
    """Raise DeviceError unless this is the device that a bitstream configures; whose board it is does not matter.

    code: device code in the bitstream, without its revision (nearflash.device.bitstreams.contents); None: it has none.
    """
    here = read(_PART) & 0x0FFF_FFFF
    if code not in (None, here):
        raise DeviceError(
            f"{what} must be for this board's device, of code {here:#x} (PSS_IDCODE), not for one of {code:#x}: "
            "name the build of this device; loading that one would leave the logic unconfigured"
        )


def set_clock(read: Read, write: Write, clock_hz: int, crystal_hz: int) -> int:
    """Set FCLK0 to the fastest clock up to `clock_hz` that the I/O PLL gives, and start it; that clock, Hz.

    Raises DeviceError where the PLL is off.
    """
    pll_hz = 0 if read(_PLLS[0]) & 3 else crystal_hz * (read(_PLLS[0]) >> 12 & 0x7F)
    every = [(first * second, first, second) for first in range(1, _DIVIDER_MAX + 1) for second in range(1, first + 1)]
    slow = [each for each in every if pll_hz and pll_hz / each[0] <= clock_hz * 1.0001]
    if not slow:
        raise DeviceError(f"the I/O PLL must run, and give {clock_hz} Hz by two dividers, not {pll_hz} Hz: boot again")
    divider, first, second = min(slow)
    write(*_UNLOCK)
    write(_CLOCK, second << 20 | first << 8)
    write(_GATE, 0)
    write(*_LOCK)
    return pll_hz // divider


def fclk0_hz(read: Read, crystal_hz: int = _PS_CLOCK_HZ) -> float:
    """Clock of the logic by the PLL's multiplier and both dividers, Hz; 0 where a divider is 0 or the PLL is off."""
    clock = read(_CLOCK)
    pll = read(_PLLS[clock >> 4 & 3])
    divider = (clock >> 8 & 0x3F) * (clock >> 20 & 0x3F)
    return 0.0 if pll & 3 or not divider else crystal_hz * (pll >> 12 & 0x7F) / divider


def check_port(read: Read, clock_hz: int, register: str, crystal_hz: int = _PS_CLOCK_HZ) -> None:
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
    stated = fclk0_hz(read, crystal_hz)
    if not stated:
        raise DeviceError(f"FCLK0 must have a PLL that runs and two dividers, not none: {hangs}; boot PYNQ's image")
    if abs(stated / clock_hz - 1) > _TOLERANCE:
        raise DeviceError(
            f"FCLK0 must be {clock_hz / 1e6:.2f} MHz, for which the bitstream was built, not {stated / 1e6:.2f} MHz: "
            "the image's I/O PLL is not at 1 GHz, or another program set the dividers; load the bitstream again"
        )
