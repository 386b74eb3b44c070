"""A kernel between the ports of a Zynq-7000's processor system, without that system: what simulation can run.

gp0 (AXI3) ─► Axi3ControlBridge ─► kernel ─► Axi3Bridge, one a memory port ─► hp (AXI3)
"""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.config import KernelConfig
from nearflash.abi.errors import ConfigError
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.boards.kernels import kernel_of
from nearflash.boards.zynq7.ps7 import GP_ID_BITS, HP_DATA_BITS, HP_ID_BITS, HP_PORTS
from nearflash.gateware.bus.axi3 import Axi3Signature
from nearflash.gateware.bus.axi3_bridge import Axi3Bridge
from nearflash.gateware.bus.axi3_control import Axi3ControlBridge

__all__ = ["CONTROL_ADDRESS", "ZynqSystem"]

#: Where the processors see the kernel's registers.
CONTROL_ADDRESS = 0x4000_0000


class ZynqSystem(wiring.Component):
    """A kernel with its bridges.

    Parameters
    ----------
    build : configuration of the kernel, its ports 64 bits wide.
    git_revision : first 32 bits of the revision that the sources are of; 0 in simulation.

    Members
    -------
    gp0 : In Axi3Signature(32, 12): the registers, from CONTROL_ADDRESS on.
    hp : array of Out Axi3Signature(64, 6), one a memory port of the kernel.
    interrupt : Out, level.

    Raises
    ------
    ConfigError : more or wider ports than a processor system has.
    """

    def __init__(self, build: KernelConfig, git_revision: int = 0) -> None:
        self.build, self.git_revision = build, git_revision
        self.kernel = kernel_of(build)
        self.ports = [name for name in self.kernel.signature.members if name.startswith("m_axi_gmem")]
        if build.port_bits != HP_DATA_BITS or len(self.ports) > HP_PORTS:
            raise ConfigError(
                f"{build.full_name} must have at most {HP_PORTS} ports of {HP_DATA_BITS} bits for a Zynq-7000, "
                f"not {len(self.ports)} of {build.port_bits}"
            )
        super().__init__(
            {
                "gp0": In(Axi3Signature(32, GP_ID_BITS)),
                "hp": Out(Axi3Signature(HP_DATA_BITS, HP_ID_BITS)).array(len(self.ports)),
                "interrupt": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Bridges on both sides."""
        m = Module()
        m.submodules.kernel = kernel = self.kernel
        registers = REGISTER_MAPS[self.build.kernel]
        address_bits = (registers.size_bytes - 1).bit_length()
        m.submodules.control = control = Axi3ControlBridge(GP_ID_BITS, CONTROL_ADDRESS, address_bits)
        wiring.connect(m, wiring.flipped(self.gp0), control.bus)
        wiring.connect(m, control.port, kernel.s_axi_control)
        for index, name in enumerate(self.ports):
            m.submodules[f"memory_{index}"] = bridge = Axi3Bridge(HP_DATA_BITS, HP_ID_BITS)
            wiring.connect(m, getattr(kernel, name), bridge.port)
            wiring.connect(m, bridge.bus, wiring.flipped(self.hp[index]))
        m.d.comb += [self.interrupt.eq(kernel.interrupt), kernel.git_revision.eq(self.git_revision)]
        return m
