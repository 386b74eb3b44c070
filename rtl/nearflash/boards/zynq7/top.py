"""The whole design of a Zynq-7000 board: processor system, clock, reset, kernel, one light.

The light blinks with FCLK0 divided by 2**26 (1.5 Hz at 100 MHz): it is on or off for ever where the clock does not run
or the reset does not end.
"""

from amaranth import ClockDomain, ClockSignal, Instance, Module, ResetSignal, Signal
from amaranth.lib import wiring
from amaranth.lib.cdc import ResetSynchronizer
from amaranth.lib.wiring import Out

from nearflash.abi.kernel.config import KernelConfig
from nearflash.boards.zynq7.ps7 import Ps7
from nearflash.boards.zynq7.system import ZynqSystem

__all__ = ["ZynqTop"]

_BLINK_BITS = 26


class ZynqTop(wiring.Component):
    """Top of a Zynq-7000 board.

    Parameters
    ----------
    build, git_revision : as of ZynqSystem.

    Members
    -------
    led : Out, the light.
    """

    def __init__(self, build: KernelConfig, git_revision: int = 0) -> None:
        self.system = ZynqSystem(build, git_revision)
        super().__init__({"led": Out(1)})

    def elaborate(self, platform: object) -> Module:
        """FCLK0 over a global buffer is the only clock; its reset is released in step with it."""
        m = Module()
        m.domains.sync = ClockDomain()
        m.submodules.system = system = self.system
        m.submodules.ps = ps = Ps7(len(system.ports))
        m.submodules.buffer = Instance("BUFG", i_I=ps.fclk, o_O=ClockSignal())
        # The reset has thousands of registers: it goes over a global buffer too, and leaves the fabric's wires alone.
        m.domains.early = early = ClockDomain(local=True)
        m.d.comb += early.clk.eq(ClockSignal())
        m.submodules.reset = ResetSynchronizer(~ps.fclk_reset_n, domain="early")
        m.submodules.reset_buffer = Instance("BUFG", i_I=early.rst, o_O=ResetSignal())
        wiring.connect(m, ps.gp0, system.gp0)
        for inner, outer in zip(system.hp, ps.hp, strict=True):
            wiring.connect(m, inner, outer)
        m.d.comb += ps.interrupt.eq(system.interrupt)

        blink = Signal(_BLINK_BITS)
        m.d.sync += blink.eq(blink + 1)
        m.d.comb += self.led.eq(blink[-1])
        return m
