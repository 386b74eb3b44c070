"""Whether a block design fits together: cells, pins, interfaces, addresses, and nothing left open."""

from collections.abc import Iterator
from pathlib import Path

from nearflash.verify.vendor.check import check_files
from nearflash.verify.vendor.netlist import IP, SEGMENTS, Shape, kernel_shape, verilog_ports
from nearflash.verify.vendor.recording import Call, option, record

__all__ = ["check_block_design"]


def check_block_design(kernel: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Complaints about system.tcl around one kernel; `environment` is what the script finds in its `env`."""
    calls = record(folder / "system.tcl", environment)
    cells, complaints = _cells(kernel, folder, calls)
    repositories = [call[2] for call in calls if call[:2] == ("set_property", "ip_repo_paths")]
    if repositories != [str(folder.resolve() / f"ip_{kernel}")]:
        complaints.append(f"ip_repo_paths must be the folder that package_{kernel}.tcl fills, not {repositories}")
    complaints += [*check_files(calls), *_nets(calls, cells), *_interfaces(calls, cells), *_addresses(kernel, calls)]
    return complaints


def _cells(kernel: str, folder: Path, calls: list[Call]) -> tuple[dict[str, Shape], list[str]]:
    """Cells by name with what they offer under their options."""
    options: dict[str, set[str]] = {}
    for call in calls:
        if call[0] == "set_property" and "-dict" in call:
            words = (option(call, "-dict") or "").replace("CONFIG.", "").split()
            pairs = (f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True))
            options.setdefault(call[-1].removeprefix("cell:"), set()).update(pairs)
    cells, complaints = {}, []
    for call in calls:
        if call[0] != "create_bd_cell":
            continue
        kind, name = option(call, "-vlnv") or option(call, "-reference") or "", call[-1]
        if kind == f"nearflash:kernel:{kernel}:1.0":
            cells[name] = kernel_shape(verilog_ports(folder / f"{kernel}.v", kernel))
        elif kind == "nand_phy":
            cells[name] = kernel_shape(verilog_ports(folder / "nand_phy.v", "nand_phy"))
        elif kind in IP:
            cells[name] = IP[kind]
            for what, needed in (IP[kind].options or {}).items():
                if needed not in options.get(name, set()):
                    complaints.append(f"{name}/{what} needs the option {needed}")
        else:
            complaints.append(f"{name}: no IP is named {kind}")
    return cells, complaints


def _nets(calls: list[Call], cells: dict[str, Shape]) -> Iterator[str]:
    """Every pin exists, every net has a driver and one width, every pin is on one."""
    driven: set[str] = set()
    driving: set[str] = set()
    for call in calls:
        if call[0] != "connect_bd_net":
            continue
        ends = []
        for name in (word.removeprefix("pin:") for word in call[1:]):
            cell, _, pin = name.partition("/")
            if cell not in cells or pin not in cells[cell].pins:
                yield f"{name} is no pin"
            else:
                ends.append((name, *cells[cell].pins[pin]))
        if len(ends) != 2:
            continue
        (source, way, width), (sink, other, sink_width) = ends
        if (way, other) != ("output", "input"):
            yield f"{source} -> {sink} must go from an output to an input"
        if width != sink_width and sink_width and width:
            yield f"{source} -> {sink} must have one width, not {width} and {sink_width}"
        if sink in driven:
            yield f"{sink} has two drivers"
        driven.add(sink)
        driving.add(source)
    for cell, shape in cells.items():
        for pin, (way, _) in shape.pins.items():
            used = driven if way == "input" else driving
            if f"{cell}/{pin}" not in used and pin not in shape.optional:
                yield f"{cell}/{pin} is not connected"


def _interfaces(calls: list[Call], cells: dict[str, Shape]) -> Iterator[str]:
    """Every interface exists, masters meet slaves, none is left open."""
    joined: set[str] = set()
    for call in calls:
        if call[0] == "connect_bd_intf_net":
            modes = []
            for name in (word.removeprefix("interface:") for word in call[1:]):
                cell, _, interface = name.partition("/")
                joined.add(name)
                modes.append(cells[cell].interfaces.get(interface) if cell in cells else None)
                if modes[-1] is None:
                    yield f"{name} is no interface"
            if None not in modes and modes != ["master", "slave"]:
                yield f"{' -> '.join(call[1:])} must go from a master to a slave"
        elif call[0] == "make_bd_intf_pins_external":
            joined.add(call[-1].removeprefix("interface:"))
    for cell, shape in cells.items():
        for interface in shape.interfaces:
            if f"{cell}/{interface}" not in joined:
                yield f"{cell}/{interface} is not connected"


def _addresses(kernel: str, calls: list[Call]) -> Iterator[str]:
    """The processor reaches the registers, the kernel reaches memory: both by names that exist."""
    processors = [kind for call in calls if (kind := option(call, "-vlnv")) in SEGMENTS]
    space, segment = SEGMENTS[processors[0] or ""] if processors else ("", "")
    expected = {
        (f"space:ps/{space}", f"segment:{kernel}/s_axi_control/reg0"),
        (f"space:{kernel}/m_axi_gmem0", f"segment:ps/{segment}"),
    }
    ranges = {
        (option(call, "-target_address_space") or "", call[-1]) for call in calls if call[0] == "assign_bd_address"
    }
    yield from (f"{' '.join(pair)} must be assigned" for pair in sorted(expected - ranges))
    yield from (f"{' '.join(pair)} names what does not exist" for pair in sorted(ranges - expected))
