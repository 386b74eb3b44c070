"""PS7, the processor system of a Zynq-7000: clock, reset, one master port, up to four memory ports, one interrupt.

Its registers, its memory and its clocks are set up by software before the bitstream is loaded: the instance has no
parameters. Inputs that are not listed here stay unconnected, which place and route ties low.

Source: AMD UG585, Zynq-7000 technical reference manual, chapter 2 (signals and interfaces).
"""

from typing import Any

from amaranth import Cat, ClockSignal, Const, Instance, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi3 import Axi3Signature

__all__ = ["GP_ID_BITS", "HP_DATA_BITS", "HP_ID_BITS", "HP_PORTS", "Ps7"]

#: Identifier of a general-purpose master port, and of a high-performance slave port.
GP_ID_BITS, HP_ID_BITS = 12, 6
#: High-performance ports, and their width.
HP_PORTS, HP_DATA_BITS = 4, 64

_FCLK_COUNT = 4
_IRQ_BITS = 20
#: Of AxSIZE: beats of up to 8 bytes.
_SIZE_BITS = 2


class Ps7(wiring.Component):
    """The processor system; its AXI ports run at the domain sync.

    Parameters
    ----------
    hp_ports : high-performance ports that are used, from S_AXI_HP0 on.

    Members
    -------
    gp0 : Out Axi3Signature(32, 12), M_AXI_GP0: addresses 0x4000_0000 to 0x7FFF_FFFF.
    hp : array of In Axi3Signature(64, 6), S_AXI_HP0 and so on: DDR and on-chip memory.
    interrupt : In, IRQF2P[0], level: interrupt 61 of the processors.
    fclk, fclk_reset_n : Out, the clock FCLK0 and its reset, which is asynchronous to it.
    """

    def __init__(self, hp_ports: int) -> None:
        self.hp_ports = hp_ports
        super().__init__(
            {
                "gp0": Out(Axi3Signature(32, GP_ID_BITS)),
                "hp": In(Axi3Signature(HP_DATA_BITS, HP_ID_BITS)).array(hp_ports),
                "interrupt": In(1),
                "fclk": Out(1),
                "fclk_reset_n": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One instance; a port's pins are named after it, without underscores."""
        m = Module()
        clocks, resets = Signal(_FCLK_COUNT), Signal(_FCLK_COUNT)
        m.d.comb += [self.fclk.eq(clocks[0]), self.fclk_reset_n.eq(resets[0])]
        pins: dict[str, Any] = {
            "o_FCLKCLK": clocks,
            "o_FCLKRESETN": resets,
            "i_IRQF2P": Cat(self.interrupt, Const(0, _IRQ_BITS - 1)),
        }
        pins |= _port_pins(m, "MAXIGP0", self.gp0, Out)
        for index, port in enumerate(self.hp):
            pins |= _port_pins(m, f"SAXIHP{index}", port, In)
            pins |= {f"i_SAXIHP{index}{name}": Const(0, width) for name, width in
                     (("ARQOS", 4), ("AWQOS", 4), ("RDISSUECAP1EN", 1), ("WRISSUECAP1EN", 1))}  # fmt: skip
        m.submodules.ps7 = Instance("PS7", **pins)
        return m


def _port_pins(m: Module, prefix: str, port: Any, flow: Any) -> dict[str, Any]:
    """Pins of an AXI port of the instance; `flow` is Out where the processor system is the master."""
    pins: dict[str, Any] = {f"i_{prefix}ACLK": ClockSignal()}
    for name, member in Axi3Signature(len(port.rdata), len(port.rid)).members.items():
        value = getattr(port, name)
        driven = member.flow == flow
        if name.endswith("size"):
            narrow = Signal(_SIZE_BITS, name=f"{prefix}_{name}")
            m.d.comb += value.eq(narrow) if driven else narrow.eq(value)
            value = narrow
        pins[f"{'o' if driven else 'i'}_{prefix}{name.upper()}"] = value
    return pins
