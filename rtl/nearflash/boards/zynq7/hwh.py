"""The hardware handoff (.hwh) that PYNQ reads beside a bitstream: address map, registers, clock, interrupt, ports.

It has what a block design's file would have of our design: the processor system with its clock dividers and used
ports, and the kernel with VLNV `nearflash:kernel:<kernel>:1.0`, its registers at CONTROL_ADDRESS and its interrupt on
IRQ_F2P.

Source: PYNQ documentation, "Overlay design methodology"; AMD UG585, chapter 25 (clocks).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from nearflash.abi.errors import ConfigError
from nearflash.abi.fields import Access, Register
from nearflash.abi.kernel.config import KernelConfig
from nearflash.boards.zynq7.ps7 import HP_PORTS
from nearflash.boards.zynq7.system import CONTROL_ADDRESS, USED_HP_PORTS
from nearflash.device.bitstreams.board import Board

__all__ = ["FCLK_SOURCE_HZ", "ClockDividers", "dividers", "hwh_text"]

#: Clock that FCLK0 is divided from: the I/O PLL as PYNQ's images set it up.
FCLK_SOURCE_HZ = 1_000_000_000

_DIVIDER_MAX = 63
_FCLKS = 4
_PS_INSTANCE = "processing_system7_0"
_ACCESS = {Access.RW: "read-write", Access.RO: "read-only", Access.CONTROL: "read-write"}


@dataclass(frozen=True)
class ClockDividers:
    """FCLK0 = FCLK_SOURCE_HZ / (first · second)."""

    first: int
    second: int

    @property
    def clock_hz(self) -> int:
        """The clock, Hz, rounded down."""
        return FCLK_SOURCE_HZ // (self.first * self.second)


def dividers(fmax_hz: int) -> ClockDividers:
    """The dividers of the fastest FCLK0 up to `fmax_hz`. Raises ConfigError where there is none."""
    every = (ClockDividers(first, second) for first in range(1, _DIVIDER_MAX + 1) for second in range(1, first + 1))
    slow = [each for each in every if each.first * each.second * fmax_hz >= FCLK_SOURCE_HZ]
    if not slow:
        raise ConfigError(f"fmax_hz must be at least {FCLK_SOURCE_HZ // _DIVIDER_MAX**2}, not {fmax_hz!r}")
    return min(slow, key=lambda each: (each.first * each.second, each.first))


def hwh_text(board: Board, build: KernelConfig, clock: ClockDividers) -> str:
    """Text of the .hwh file of a build for a board."""
    root = Element("EDKSYSTEM", {"EDWVERSION": "1.2", "TIMESTAMP": "0", "VIVADOVERSION": "nearflash"})
    device, package = board.part[:7], board.part[7:]
    SubElement(root, "SYSTEMINFO", {"ARCH": "zynq", "BOARD": board.name, "DEVICE": device,
                                    "NAME": f"{build.kernel}", "PACKAGE": package.partition("-")[0],
                                    "SPEEDGRADE": "-" + package.partition("-")[2]})  # fmt: skip
    ports = SubElement(root, "EXTERNALPORTS")
    SubElement(ports, "PORT", {"DIR": "O", "NAME": "led", "SIGIS": "undef", "SIGNAME": "led"})
    SubElement(root, "EXTERNALINTERFACES")
    modules = SubElement(root, "MODULES")
    _processor(modules, build, clock)
    _kernel(modules, build)
    ElementTree.indent(root)
    return "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(root, encoding="unicode") + "\n"


def _module(modules: Element, instance: str, kind: str, vlnv: str, parameters: Mapping[str, object]) -> Element:
    # pynqmetadata up to 0.1.9, which PYNQ's images have, knows a processing system by IS_PL alone.
    in_logic = "FALSE" if instance == _PS_INSTANCE else "TRUE"
    module = SubElement(modules, "MODULE", {"FULLNAME": f"/{instance}", "HWVERSION": vlnv.rpartition(":")[2],
                                            "INSTANCE": instance, "IPTYPE": "PERIPHERAL", "IS_PL": in_logic,
                                            "MODCLASS": "PERIPHERAL", "MODTYPE": kind, "VLNV": vlnv})  # fmt: skip
    table = SubElement(module, "PARAMETERS")
    for name, value in parameters.items():
        SubElement(table, "PARAMETER", {"NAME": name, "VALUE": str(value)})
    return module


def _ports(module: Element, ports: Mapping[str, tuple[str, str, str]]) -> None:
    """Pins: by name, direction, kind and net."""
    table = SubElement(module, "PORTS")
    for name, (direction, kind, net) in ports.items():
        SubElement(table, "PORT", {"DIR": direction, "NAME": name, "SIGIS": kind, "SIGNAME": net})


def _bus(module: Element, name: str, direction: str, width_bits: int) -> None:
    """A memory-mapped interface, which PYNQ from release 3 on follows from the processors to the kernel."""
    SubElement(SubElement(module, "BUSINTERFACES"), "BUSINTERFACE", {
        "BUSNAME": "registers", "DATAWIDTH": str(width_bits), "NAME": name, "TYPE": direction,
        "VLNV": "xilinx.com:interface:aximm:1.0",
    })  # fmt: skip


def _processor(modules: Element, build: KernelConfig, clock: ClockDividers) -> None:
    used = min(build.ports, USED_HP_PORTS)  # type: ignore[attr-defined]
    parameters: dict[str, object] = {
        "PCW_FPGA0_PERIPHERAL_FREQMHZ": f"{clock.clock_hz / 1e6:.6f}",
        **{f"PCW_FPGA_FCLK{index}_ENABLE": int(index == 0) for index in range(_FCLKS)},
        **{f"PCW_FCLK{index}_PERIPHERAL_DIVISOR0": clock.first if index == 0 else 1 for index in range(_FCLKS)},
        **{f"PCW_FCLK{index}_PERIPHERAL_DIVISOR1": clock.second if index == 0 else 1 for index in range(_FCLKS)},
        **{f"PCW_FCLK{index}_PERIPHERAL_CLKSRC": "IO PLL" for index in range(_FCLKS)},
        # PYNQ 4.0.0 takes the frequency of a Zynq-7000's clock from this name of a later family, and fails without it.
        "PSU__CRL_APB__PL0_REF_CTRL__ACT_FREQMHZ": f"{clock.clock_hz / 1e6:.6f}",
        "PCW_USE_M_AXI_GP0": 1,
        **{f"PCW_USE_S_AXI_HP{index}": int(index < used) for index in range(HP_PORTS)},
        **{f"PCW_S_AXI_HP{index}_DATA_WIDTH": build.port_bits for index in range(used)},
        "PCW_USE_FABRIC_INTERRUPT": 1,
        "PCW_IRQ_F2P_INTR": 1,
    }
    module = _module(modules, _PS_INSTANCE, "processing_system7", "xilinx.com:ip:processing_system7:5.5", parameters)
    _ports(module, {"FCLK_CLK0": ("O", "clk", "clk"), "FCLK_RESET0_N": ("O", "rst", "reset_n"),
                    "IRQ_F2P": ("I", "INTERRUPT", "interrupt")})  # fmt: skip
    _bus(module, "M_AXI_GP0", "MASTER", 32)
    size = build.registers.size_bytes
    SubElement(SubElement(module, "MEMORYMAP"), "MEMRANGE", {
        "ADDRESSBLOCK": "Reg", "BASENAME": "C_BASEADDR", "BASEVALUE": f"{CONTROL_ADDRESS:#010x}",
        "HIGHNAME": "C_HIGHADDR", "HIGHVALUE": f"{CONTROL_ADDRESS + size - 1:#010x}", "INSTANCE": build.kernel,
        "IS_DATA": "TRUE", "IS_INSTRUCTION": "TRUE", "MASTERBUSINTERFACE": "M_AXI_GP0", "MEMTYPE": "REGISTER",
        "SLAVEBUSINTERFACE": "s_axi_control",
    })  # fmt: skip


def _kernel(modules: Element, build: KernelConfig) -> None:
    used = build.ports  # type: ignore[attr-defined]
    parameters = {"CONFIG": build.full_name, "CONFIG_DIGEST": build.digest, "C_S_AXI_CONTROL_DATA_WIDTH": 32,
                  **{f"C_M_AXI_GMEM{index}_DATA_WIDTH": build.port_bits for index in range(used)}}  # fmt: skip
    module = _module(modules, build.kernel, build.kernel, f"nearflash:kernel:{build.kernel}:1.0", parameters)
    blocks = SubElement(module, "ADDRESSBLOCKS")
    block = SubElement(blocks, "ADDRESSBLOCK", {"ACCESS": "read-write", "INTERFACE": "s_axi_control", "NAME": "Reg",
                                                "RANGE": str(build.registers.size_bytes),
                                                "USAGE": "register"})  # fmt: skip
    registers = SubElement(block, "REGISTERS")
    for register in build.registers:
        _register(registers, register)
    _ports(module, {"ap_clk": ("I", "clk", "clk"), "ap_rst_n": ("I", "rst", "reset_n"),
                    "interrupt": ("O", "INTERRUPT", "interrupt")})  # fmt: skip
    _bus(module, "s_axi_control", "SLAVE", 32)


def _register(registers: Element, register: Register) -> None:
    """A register; one of 64 bits is two of PYNQ's, `name_1` (low) and `name_2`, as HLS names them."""
    words = register.width_bits // 32
    for word in range(words):
        name = register.name if words == 1 else f"{register.name}_{word + 1}"
        access = _ACCESS[register.access]
        element = SubElement(registers, "REGISTER", {"NAME": name})
        _properties(element, {"ADDRESS_OFFSET": register.offset + 4 * word, "SIZE": 32, "ACCESS": access,
                              "DESCRIPTION": register.doc})  # fmt: skip
        fields = SubElement(element, "FIELDS")
        for field in register.fields if words == 1 else ():
            inner = SubElement(fields, "FIELD", {"NAME": field.name})
            _properties(inner, {"BIT_OFFSET": field.lsb, "BIT_WIDTH": field.width, "ACCESS": access,
                                "DESCRIPTION": field.doc})  # fmt: skip


def _properties(element: Element, properties: Mapping[str, object]) -> None:
    for name, value in properties.items():
        SubElement(element, "PROPERTY", {"NAME": name, "VALUE": str(value)})
