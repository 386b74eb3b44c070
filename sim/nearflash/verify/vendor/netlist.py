"""Ports of emitted Verilog tops, read from the text, and what AMD's IP has, from its product guides.

Both are independent of the generators, so that a wrong name in either is seen.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from nearflash.abi.errors import BitstreamError

__all__ = ["AXI4", "AXI_LITE", "IP", "SEGMENTS", "Ports", "Shape", "kernel_shape", "verilog_ports"]

Ports = dict[str, tuple[str, int]]
"""Direction ("input" or "output") and width of each port by name."""

_PORT = re.compile(r"^  (input|output) (?:\[(\d+):0\] )?([A-Za-z_]\w*);$", re.MULTILINE)
_ADDRESS = ("addr", "prot", "valid", "ready")
_FULL = ("len", "size", "burst", "cache", "id")
_DATA = ("wdata", "wstrb", "wvalid", "wready", "bresp", "bvalid", "bready", "rdata", "rresp", "rvalid", "rready")
AXI_LITE = frozenset([f"{way}{name}" for way in ("aw", "ar") for name in _ADDRESS] + list(_DATA))
"""Signals of an AXI4-Lite interface (AMBA IHI 0022, B1)."""
AXI4 = AXI_LITE | {f"{way}{name}" for way in ("aw", "ar") for name in _FULL} | {"wlast", "rlast", "bid", "rid"}
"""Signals of an AXI4 interface (A2), without those that are optional."""


@dataclass(frozen=True)
class Shape:
    """Ports of a cell of a block design: interfaces by mode, pins by direction and width (0: any)."""

    interfaces: dict[str, str]
    pins: Ports
    optional: frozenset[str] = frozenset()
    """What may stay unconnected."""
    options: dict[str, str] | None = None
    """CONFIG property that an interface or pin exists with, as `NAME VALUE`."""


def verilog_ports(path: Path, module: str) -> Ports:
    """The ports of a module in a file. Raises BitstreamError where the file or the module is missing."""
    text = path.read_text() if path.is_file() else ""
    module_text = re.search(rf"^module {re.escape(module)}\(.*?^endmodule", text, re.MULTILINE | re.DOTALL)
    if module_text is None:
        raise BitstreamError(f"{path} must have a module {module}, not none")
    return {name: (way, int(high or 0) + 1) for way, high, name in _PORT.findall(module_text[0])}


def kernel_shape(ports: Ports) -> Shape:
    """A kernel as a cell: its complete AXI interfaces, and the pins that belong to none."""
    prefixes = {name[: -len("_awaddr")] for name in ports if name.endswith("_awaddr")}
    complete = {}
    for prefix in prefixes:
        signals = {name.removeprefix(f"{prefix}_") for name in ports if name.startswith(f"{prefix}_")}
        if signals == (AXI_LITE if prefix == "s_axi_control" else AXI4):
            complete[prefix] = "slave" if ports[f"{prefix}_awaddr"][0] == "input" else "master"
    pins = {name: port for name, port in ports.items() if not any(name.startswith(f"{bus}_") for bus in complete)}
    return Shape(complete, pins)


_SMARTCONNECT = Shape(
    {"S00_AXI": "slave", "M00_AXI": "master"},
    {"aclk": ("input", 1), "aclk1": ("input", 1), "aresetn": ("input", 1)},
    options={"aclk1": "NUM_CLKS 2"},
)
IP = {
    "xilinx.com:ip:processing_system7:5.5": Shape(
        {"M_AXI_GP0": "master", "S_AXI_HP0": "slave", "DDR": "pads", "FIXED_IO": "pads"},
        {
            "FCLK_CLK0": ("output", 1), "FCLK_RESET0_N": ("output", 1), "IRQ_F2P": ("input", 0),
            "M_AXI_GP0_ACLK": ("input", 1), "S_AXI_HP0_ACLK": ("input", 1),
        },
        options={"M_AXI_GP0": "PCW_USE_M_AXI_GP0 1", "S_AXI_HP0": "PCW_USE_S_AXI_HP0 1",
                 "IRQ_F2P": "PCW_USE_FABRIC_INTERRUPT 1"},
    ),
    "xilinx.com:ip:zynq_ultra_ps_e:3.5": Shape(
        {"M_AXI_HPM0_FPD": "master", "S_AXI_HP0_FPD": "slave"},
        {
            "pl_clk0": ("output", 1), "pl_resetn0": ("output", 1), "pl_ps_irq0": ("input", 0),
            "maxihpm0_fpd_aclk": ("input", 1), "saxihp0_fpd_aclk": ("input", 1),
        },
        options={"M_AXI_HPM0_FPD": "PSU__USE__M_AXI_GP0 1", "S_AXI_HP0_FPD": "PSU__USE__S_AXI_GP2 1",
                 "pl_ps_irq0": "PSU__USE__IRQ0 1"},
    ),
    "xilinx.com:ip:smartconnect:1.0": _SMARTCONNECT,
    "xilinx.com:ip:clk_wiz:6.0": Shape(
        {}, {"clk_in1": ("input", 1), "clk_out1": ("output", 1), "resetn": ("input", 1), "locked": ("output", 1)},
        options={"resetn": "RESET_TYPE ACTIVE_LOW", "locked": "USE_LOCKED true"},
    ),
    "xilinx.com:ip:proc_sys_reset:5.0": Shape(
        {},
        {
            "slowest_sync_clk": ("input", 1), "ext_reset_in": ("input", 1), "dcm_locked": ("input", 1),
            "interconnect_aresetn": ("output", 1), "peripheral_aresetn": ("output", 1),
            "aux_reset_in": ("input", 1), "mb_debug_sys_rst": ("input", 1),
        },
        optional=frozenset({"aux_reset_in", "mb_debug_sys_rst"}),
    ),
}  # fmt: skip
"""What the IP of our block designs has, with the options that we set (PG082, PG201, PG247, PG065, PG164)."""
SEGMENTS = {
    "xilinx.com:ip:processing_system7:5.5": ("Data", "S_AXI_HP0/HP0_DDR_LOWOCM"),
    "xilinx.com:ip:zynq_ultra_ps_e:3.5": ("Data", "SAXIGP2/HP0_DDR_LOW"),
}
"""Address space and memory segment of each processor system."""
