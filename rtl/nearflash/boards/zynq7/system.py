"""A kernel between the ports of a Zynq-7000's processor system, without that system: what simulation can run.

gp0 (AXI3) ─► Axi3ControlBridge ─► kernel ─► arbiters where memory ports share one ─► Axi3Bridge ─► hp (AXI3)
"""

from typing import Any

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.boards.design.kernels import kernel_of
from nearflash.boards.zynq7.ps7 import GP_ID_BITS, HP_DATA_BITS, HP_ID_BITS, HP_PORTS
from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import connect_channels
from nearflash.gateware.bus.axi3 import Axi3Signature
from nearflash.gateware.bus.axi3_bridge import Axi3Bridge
from nearflash.gateware.bus.axi3_control import Axi3ControlBridge
from nearflash.gateware.bus.transfer import Burst
from nearflash.gateware.bus.write_arbiter import WriteArbiter
from nearflash.gateware.stream.half import HalfBuffer

__all__ = ["CONTROL_ADDRESS", "USED_HP_PORTS", "ZynqSystem"]

#: Where the processors see the kernel's registers.
CONTROL_ADDRESS = 0x4000_0000
#: Ports of the processor system that a kernel gets at most. At 100 MHz two of them carry 1.6 GB/s each way; the DDR
#: memory of a PYNQ-Z2 gives 2.1 GB/s in all, so that four would be no faster, and have twice the wires.
USED_HP_PORTS = 2


class ZynqSystem(wiring.Component):
    """A kernel with its bridges.

    Parameters
    ----------
    build : configuration of the kernel, its ports 64 bits wide.
    git_revision : first 32 bits of the revision that the sources are of; 0 in simulation.
    hp_ports : ports of the processor system at most; kernels with more memory ports share them, neighbours each.

    Members
    -------
    gp0 : In Axi3Signature(32, 12): the registers, from CONTROL_ADDRESS on.
    hp : array of Out Axi3Signature(64, 6), as many as are used.
    interrupt : Out, level.

    Raises
    ------
    ConfigError : ports of another width than a processor system's, or hp_ports that it does not have.
    """

    def __init__(self, build: KernelConfig, git_revision: int = 0, *, hp_ports: int = USED_HP_PORTS) -> None:
        self.build, self.git_revision = build, git_revision
        self.kernel = kernel_of(build)
        if not 1 <= hp_ports <= HP_PORTS:
            raise ConfigError(f"hp_ports must be between 1 and {HP_PORTS}, not {hp_ports!r}")
        if build.port_bits != HP_DATA_BITS:
            raise ConfigError(
                f"{build.full_name} must have ports of {HP_DATA_BITS} bits for a Zynq-7000, not {build.port_bits}"
            )
        ports = [name for name in self.kernel.signature.members if name.startswith("m_axi_gmem")]
        used = min(hp_ports, len(ports))
        #: The kernel's memory ports behind each port of the processor system.
        self.ports = [[name for index, name in enumerate(ports) if index * used // len(ports) == hp]
                      for hp in range(used)]  # fmt: skip
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
        for index, names in enumerate(self.ports):
            m.submodules[f"memory_{index}"] = bridge = Axi3Bridge(HP_DATA_BITS, HP_ID_BITS)
            _share(m, index, [getattr(kernel, name) for name in names], bridge.port)
            wiring.connect(m, bridge.bus, wiring.flipped(self.hp[index]))
        m.d.comb += [self.interrupt.eq(kernel.interrupt), kernel.git_revision.eq(self.git_revision)]
        return m


def _share(m: Module, index: int, ports: list[Any], bus: Any) -> None:
    """Connects memory ports to an AXI4 slave, over arbiters where there are several.

    A half buffer between each port's addresses and its arbiter keeps their logic apart; it has room again before the
    burst's data are through.
    """
    if len(ports) == 1:
        wiring.connect(m, ports[0], bus)
        return
    m.submodules[f"read_{index}"] = read = ReadArbiter(len(ports), HP_DATA_BITS)
    m.submodules[f"write_{index}"] = write = WriteArbiter(len(ports), HP_DATA_BITS)
    for arbiter, prefix in ((read, "ar"), (write, "aw")):
        for number, (port, shared) in enumerate(zip(ports, arbiter.port, strict=True)):
            connect_channels(m, shared, port)
            m.submodules[f"{prefix}_{index}_{number}"] = buffer = HalfBuffer(Burst)
            m.d.comb += [
                buffer.i.valid.eq(getattr(port, f"{prefix}valid")),
                getattr(port, f"{prefix}ready").eq(buffer.i.ready),
                buffer.i.payload.address.eq(getattr(port, f"{prefix}addr")),
                buffer.i.payload.length.eq(getattr(port, f"{prefix}len")),
                getattr(shared, f"{prefix}valid").eq(buffer.o.valid),
                buffer.o.ready.eq(getattr(shared, f"{prefix}ready")),
                getattr(shared, f"{prefix}addr").eq(buffer.o.payload.address),
                getattr(shared, f"{prefix}len").eq(buffer.o.payload.length),
            ]
        connect_channels(m, arbiter.bus, bus)
