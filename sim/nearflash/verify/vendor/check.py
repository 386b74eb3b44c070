"""Whether a vendor package fits together: every file, module, port, bus, register, field and pin that it names exists.

Each function gives complaints, one line each; none means that nothing is missing. What a script names is compared with
the emitted Verilog's text and the register table.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as xml

from nearflash.abi.fields import Access
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.verify.vendor.netlist import kernel_shape, verilog_ports
from nearflash.verify.vendor.recording import Call, option, record

__all__ = ["check_connectivity", "check_constraints", "check_files", "check_kernel_xml", "check_packaging"]


def check_files(calls: list[Call]) -> Iterator[str]:
    """Files that are added and folders that are searched exist, or are made by the tools."""
    for call in calls:
        named = []
        if call[0] == "add_files":
            named = call[-1].split()
        elif call[0] == "package_xo":
            named = [option(call, "-kernel_xml") or ""]
        for name in named:
            if not name.startswith("generated:") and not (Path(name).is_file() and Path(name).stat().st_size):
                yield f"{call[0]}: {Path(name).name} is missing or empty"


def check_packaging(kernel: str, folder: Path) -> list[str]:
    """Complaints about package_<kernel>.tcl and the kernel's Verilog."""
    calls = record(folder / f"package_{kernel}.tcl")
    ports = verilog_ports(folder / f"{kernel}.v", kernel)
    shape = kernel_shape(ports)
    complaints = list(check_files(calls))
    if ("set_property", "top", kernel, "fileset") not in calls:
        complaints.append(f"top must be {kernel}")
    associated = set()
    for call in calls:
        if call[0] == "ipx::associate_bus_interfaces":
            bus = option(call, "-busif") or ""
            associated.add(bus)
            for pin in (option(call, "-clock"), option(call, "-reset")):
                if pin not in shape.pins:
                    complaints.append(f"{bus}: {kernel} has no pin {pin}")
            if bus not in shape.interfaces:
                complaints.append(f"{kernel} has no complete interface {bus}")
        elif call[0] == "ipx::infer_bus_interface" and call[1] not in shape.pins:
            complaints.append(f"{kernel} has no pin {call[1]}")
        elif call[0] == "ipx::get_bus_interfaces" and call[1] not in shape.interfaces:
            complaints.append(f"{kernel} has no complete interface {call[1]}")
    complaints += [f"{bus} has no clock" for bus in sorted(shape.interfaces.keys() - associated)]
    return complaints + list(_registers(kernel, calls))


def _registers(kernel: str, calls: list[Call]) -> Iterator[str]:
    """Words and fields as the script makes them, against the register table."""
    expected = {}
    for register in REGISTER_MAPS[kernel]:
        parts = register.width_bits // 32
        for part in range(parts):
            name = register.name if parts == 1 else f"{register.name}_{part + 1}"
            access = "read-only" if register.access is Access.RO else "read-write"
            expected[f"register:{name}"] = {"address_offset": register.offset + 4 * part, "size": 32, "access": access}
            for field in register.fields if parts == 1 else ():
                expected[f"field:{field.name}:register:{name}"] = {"bit_offset": field.lsb, "bit_width": field.width}
    registers: dict[str, dict[str, int | str]] = {
        f"{call[0][9:]}:{call[1]}" if call[0] == "ipx::add_register" else f"field:{call[1]}:{call[2]}": {}
        for call in calls if call[0] in ("ipx::add_register", "ipx::add_field")
    }  # fmt: skip
    for call in calls:
        if call[0] == "set_property" and call[-1] in registers:
            registers[call[-1]][call[1]] = int(call[2], 0) if call[2][0].isdigit() else call[2]
    for name in sorted(expected.keys() | registers.keys()):
        if expected.get(name) != registers.get(name):
            yield f"{name} must be {expected.get(name)}, not {registers.get(name)}"


def check_kernel_xml(kernel: str, folder: Path) -> list[str]:
    """Complaints about <kernel>.xml: arguments against the register table, ports against the Verilog."""
    root = xml.parse(folder / f"{kernel}.xml").getroot()
    interfaces = kernel_shape(verilog_ports(folder / f"{kernel}.v", kernel)).interfaces
    complaints = []
    ports = {port.attrib["name"]: port.attrib["mode"] for port in root.iter("port")}
    if ports != interfaces:
        complaints.append(f"ports must be {interfaces}, not {ports}")
    arguments = {argument.attrib["name"]: argument.attrib for argument in root.iter("arg")}
    written = {r.name: r for r in REGISTER_MAPS[kernel] if r.access is Access.RW}
    complaints += [f"{name} must be an argument" for name in sorted(written.keys() - arguments.keys())]
    for name, attributes in arguments.items():
        register = written.get(name)
        offset, size = int(attributes["offset"], 0), int(attributes["size"], 0)
        if register is None or (offset, size) != (register.offset, register.width_bits // 8):
            complaints.append(f"{name} must be {register}, not at {offset:#x} with {size} bytes")
        if attributes["port"] not in interfaces:
            complaints.append(f"{name}: {kernel} has no interface {attributes['port']}")
    return complaints


def check_connectivity(kernels: list[str], folder: Path) -> list[str]:
    """Complaints about connectivity.cfg: compute units, and every memory port of each."""
    lines = (folder / "connectivity.cfg").read_text().partition("[connectivity]")[2].split()
    units = {unit: kernel for kernel, _, unit in (line[3:].split(":") for line in lines if line.startswith("nk="))}
    complaints = [f"nk: {kernel} is no kernel" for kernel in sorted(set(units.values()) - set(kernels))]
    complaints += [f"{kernel} has no compute unit" for kernel in kernels if kernel not in units.values()]
    joined = {line[3:].partition(":")[0] for line in lines if line.startswith("sp=")}
    masters = {
        f"{unit}.{bus}"
        for unit, kernel in units.items() if kernel in kernels
        for bus, mode in kernel_shape(verilog_ports(folder / f"{kernel}.v", kernel)).interfaces.items()
        if mode == "master"
    }  # fmt: skip
    complaints += [f"sp: {name} is no memory port" for name in sorted(joined - masters)]
    complaints += [f"{name} has no memory" for name in sorted(masters - joined)]
    placed = {line[4:].partition(":")[0] for line in lines if line.startswith("slr=")}
    return complaints + [f"slr: {name} is no compute unit" for name in sorted(placed - units.keys())]


def check_constraints(path: Path, kernel: str, folder: Path) -> list[str]:
    """Complaints about an XDC file: ports of the kernel, and pins of the kernel's cell."""
    ports = verilog_ports(folder / f"{kernel}.v", kernel)
    complaints = []
    for call in record(path):
        if call[0] == "get_ports" and call[1] not in ports:
            complaints.append(f"{path.name}: {kernel} has no port {call[1]}")
        if call[0] == "get_pins":
            cell, _, pin = (option(call, "-filter") or "").removeprefix("NAME =~ */").partition("/")
            if cell != kernel or pin not in ports:
                complaints.append(f"{path.name}: no pin {pin} of a cell {cell}")
    return complaints
