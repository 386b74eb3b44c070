"""Tcl that builds a Zynq board's bitstream around one packaged kernel: `system.tcl`.

    ps (control) ──► control_bus ──► kernel s_axi_control        ps (interrupt) ◄── kernel interrupt
    ps (memory)  ◄── memory_bus  ◄── kernel m_axi_gmem0          kernel nand0 … ◄──► nand_phy_0 …
    ps (clock) ──► clock ──► kernel, buses, reset

SmartConnects cross from the kernel's clock to that of the processor's ports and from AXI4 to their protocol. What only
the board's maker knows comes from outside, in variables of the environment:

    NEARFLASH_PS_PRESET  a Tcl file that sets the processor's DRAM, pins and clocks of the cell `ps`
    NEARFLASH_NAND_PHY   a folder: nand_phy.v in place of ours, its constraints (*.xdc), and connect.tcl for its pads

Without the first, a board with a preset of its own (BOARD_PARTS) uses that. Without the second the NAND links end in
AbsentNand. Source: AMD UG994 (block designs), UG835 (Tcl commands).
"""

from collections.abc import Mapping

from nearflash.boards.vendor.kernel import KernelDesign
from nearflash.boards.vendor.kernel_xml import vlnv
from nearflash.boards.vendor.package_tcl import HEADER, ip_folder
from nearflash.boards.vendor.processor import Processor, processor_of
from nearflash.device.bitstreams.board import Board

__all__ = ["BOARD_PARTS", "block_design_tcl"]

BOARD_PARTS = {"zynq7045": "xilinx.com:zc706:part0:1.4"}
"""Vivado's own board files, with presets of the processor system."""
_CELLS = {
    "clock": "xilinx.com:ip:clk_wiz:6.0",
    "reset": "xilinx.com:ip:proc_sys_reset:5.0",
    "control_bus": "xilinx.com:ip:smartconnect:1.0",
    "memory_bus": "xilinx.com:ip:smartconnect:1.0",
}


def block_design_tcl(board: Board, design: KernelDesign) -> str:
    """Text of the script. Raises ConfigError for a part without a processor system."""
    processor = processor_of(board)
    sections = (
        _project(board, design), _cells(board, design, processor), _clocks(design, processor),
        _buses(design, processor), _nand(design), _addresses(board, design, processor), _build(design),
    )  # fmt: skip
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _project(board: Board, design: KernelDesign) -> list[str]:
    lines = [
        HEADER,
        "set here [file dirname [file normalize [info script]]]",
        f"create_project -force system [file join $here project_system] -part {board.part}",
    ]
    if board.name in BOARD_PARTS:
        lines.append(f"set_property board_part {BOARD_PARTS[board.name]} [current_project]")
    lines += [
        f"set_property ip_repo_paths [list [file join $here {ip_folder(design.top)}]] [current_project]",
        "update_ip_catalog",
    ]
    if design.links:
        lines += [
            "set phy [expr {[info exists env(NEARFLASH_NAND_PHY)] ? $env(NEARFLASH_NAND_PHY) : $here}]",
            "add_files -norecurse [list [file join $phy nand_phy.v]]",
        ]
    return [
        *lines,
        "add_files -fileset constrs_1 -norecurse [list [file join $here system.xdc]]",
        *(["if {$phy ne $here} { foreach file [glob -nocomplain -directory $phy *.xdc] "
           "{ add_files -fileset constrs_1 -norecurse [list $file] } }"] if design.links else []),
        "create_bd_design system",
    ]  # fmt: skip


def _cells(board: Board, design: KernelDesign, processor: Processor) -> list[str]:
    kernel = design.top
    lines = [f"create_bd_cell -type ip -vlnv {processor.vlnv} ps"]
    if board.name in BOARD_PARTS:
        lines += [
            "if {![info exists env(NEARFLASH_PS_PRESET)]} { apply_bd_automation -rule xilinx.com:bd_rule:"
            "processing_system7 -config {make_external none apply_board_preset 1} [get_bd_cells ps] }"
        ]
    else:
        lines += [
            "if {![info exists env(NEARFLASH_PS_PRESET)]} { error {NEARFLASH_PS_PRESET must name the Tcl file with "
            "the processor's DRAM, pins and clocks, which the board's maker publishes} }"
        ]
    lines += [
        "if {[info exists env(NEARFLASH_PS_PRESET)]} { source $env(NEARFLASH_PS_PRESET) }",
        _options("ps", processor.options),
        *(f"create_bd_cell -type ip -vlnv {kind} {name}" for name, kind in _CELLS.items()),
        _options("clock", {
            "PRIM_IN_FREQ": processor.bus_clock_hz / 1e6, "CLKOUT1_REQUESTED_OUT_FREQ": board.clock_hz / 1e6,
            "USE_RESET": "true", "RESET_TYPE": "ACTIVE_LOW", "RESET_PORT": "resetn", "USE_LOCKED": "true",
        }),
        *(_options(name, {"NUM_SI": 1, "NUM_MI": 1, "NUM_CLKS": 2}) for name in ("control_bus", "memory_bus")),
        f"create_bd_cell -type ip -vlnv {vlnv(kernel)} {kernel}",
        *(f"create_bd_cell -type module -reference nand_phy nand_phy_{index}" for index in range(len(design.links))),
        *(f"make_bd_intf_pins_external -name {name} [get_bd_intf_pins ps/{name}]" for name in processor.external),
    ]  # fmt: skip
    return lines


def _options(cell: str, options: Mapping[str, object]) -> str:
    pairs = " ".join(f"CONFIG.{name} {value:g}" if isinstance(value, float) else f"CONFIG.{name} {value}"
                     for name, value in options.items())  # fmt: skip
    return f"set_property -dict [list {pairs}] [get_bd_cells {cell}]"


def _pins(source: str, *sinks: str) -> list[str]:
    return [f"connect_bd_net [get_bd_pins {source}] [get_bd_pins {sink}]" for sink in sinks]


def _interfaces(source: str, sink: str) -> str:
    return f"connect_bd_intf_net [get_bd_intf_pins {source}] [get_bd_intf_pins {sink}]"


def _clocks(design: KernelDesign, processor: Processor) -> list[str]:
    kernel = design.top
    phys = [f"nand_phy_{index}" for index in range(len(design.links))]
    buses = ("control_bus", "memory_bus")
    return [
        *_pins(f"ps/{processor.clock}", "clock/clk_in1", f"ps/{processor.control_clock}",
               f"ps/{processor.memory_clock}", *(f"{bus}/aclk1" for bus in buses)),
        *_pins(f"ps/{processor.reset_n}", "clock/resetn", "reset/ext_reset_in"),
        *_pins("clock/clk_out1", "reset/slowest_sync_clk", f"{kernel}/ap_clk", *(f"{bus}/aclk" for bus in buses),
               *(f"{phy}/ap_clk" for phy in phys)),
        *_pins("clock/locked", "reset/dcm_locked"),
        *_pins("reset/interconnect_aresetn", *(f"{bus}/aresetn" for bus in buses)),
        *_pins("reset/peripheral_aresetn", f"{kernel}/ap_rst_n", *(f"{phy}/ap_rst_n" for phy in phys)),
    ]  # fmt: skip


def _buses(design: KernelDesign, processor: Processor) -> list[str]:
    kernel = design.top
    return [
        _interfaces(f"ps/{processor.control}", "control_bus/S00_AXI"),
        _interfaces("control_bus/M00_AXI", f"{kernel}/s_axi_control"),
        _interfaces(f"{kernel}/m_axi_gmem0", "memory_bus/S00_AXI"),
        _interfaces("memory_bus/M00_AXI", f"ps/{processor.memory}"),
        *_pins(f"{kernel}/interrupt", f"ps/{processor.interrupt}"),
    ]


def _nand(design: KernelDesign) -> list[str]:
    """Each link's wires, from the side that drives them."""
    lines = []
    for index, link in enumerate(design.links):
        for pin in design.bus_pins(link):
            inner = f"nand_phy_{index}/{pin.name.removeprefix(f'{link}_')}"
            ends = (inner, f"{design.top}/{pin.name}")
            lines += _pins(*(ends if pin.is_input else ends[::-1]))
    if lines:
        lines.append("if {$phy ne $here} { source [file join $phy connect.tcl] }")
    return lines


def _addresses(board: Board, design: KernelDesign, processor: Processor) -> list[str]:
    kernel = design.top
    return [
        f"assign_bd_address -offset {processor.control_address:#x} -range 4K -target_address_space "
        f"[get_bd_addr_spaces ps/Data] [get_bd_addr_segs {kernel}/s_axi_control/reg0]",
        f"assign_bd_address -offset {board.memory.base_address:#x} -range {board.memory.size_bytes >> 20}M "
        f"-target_address_space [get_bd_addr_spaces {kernel}/m_axi_gmem0] "
        f"[get_bd_addr_segs ps/{processor.memory_segment}]",
        "validate_bd_design",
        "save_bd_design",
    ]


def _build(design: KernelDesign) -> list[str]:
    """The bitstream, its handoff and its figures, beside the script, under the kernel's name."""
    stem = design.top
    return [
        "add_files -norecurse [make_wrapper -files [get_files system.bd] -top]",
        "set_property top system_wrapper [current_fileset]",
        "update_compile_order -fileset sources_1",
        "launch_runs impl_1 -to_step route_design -jobs 4",
        "wait_on_run impl_1",
        "if {![string match {route_design Complete*} [get_property STATUS [get_runs impl_1]]]} "
        "{ error {impl_1 must route the design; see its log} }",
        "open_run impl_1",
        f"report_timing_summary -file [file join $here {stem}.timing.txt]",
        f"report_utilization -file [file join $here {stem}.utilisation.txt]",
        *_figures(stem),
        f"write_bitstream -force [file join $here {stem}.bit]",
        f"write_hw_platform -fixed -force -file [file join $here {stem}.xsa]",
        "close_project",
    ]


def _figures(stem: str) -> list[str]:
    """Write the manifest's figures: the worst path and the cells by kind, one name and value a line."""
    kinds = "{lut {LUT* SRL* RAMD* RAMS*} ff FD* dsp DSP48E* ramb36 RAMB36* ramb18 RAMB18*}"
    return [
        "set path [lindex [get_timing_paths -max_paths 1] 0]",
        f"set figures [open [file join $here {stem}.figures] w]",
        "foreach property {SLACK STARTPOINT_PIN ENDPOINT_PIN} "
        '{ puts $figures "[string tolower $property] [get_property $property $path]" }',
        f"foreach {{kind patterns}} {kinds} {{",
        "    set count 0",
        "    foreach pattern $patterns "
        '{ incr count [llength [get_cells -hierarchical -filter "REF_NAME =~ $pattern"]] }',
        '    puts $figures "$kind $count"',
        "}",
        "close $figures",
    ]
