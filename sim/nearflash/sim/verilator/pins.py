"""The C++ accessors of a kernel's bus pins, and of the streams inside it.

A bus signal that the kernel does not have (the read channels of a port that only writes, identifiers) becomes a
constant 0 that nobody drives, so the shim need not know.
"""

import re

from nearflash.sim.verilog import Design, Port, encode

__all__ = ["memory_ports", "pins_header", "streams_configuration", "waits_header"]

_ADDRESS = ("addr", "valid", "ready")
_AXI4 = (
    *(f"{channel}{name}" for channel in ("aw", "ar") for name in ("id", "len", "size", "burst", *_ADDRESS)),
    *("wstrb", "wlast", "wvalid", "wready", "bid", "bresp", "bvalid", "bready"),
    *("rid", "rresp", "rlast", "rvalid", "rready"),
)
_LITE = (
    *(f"{channel}{name}" for channel in ("aw", "ar") for name in _ADDRESS),
    *("wdata", "wstrb", "wvalid", "wready", "bresp", "bvalid", "bready", "rdata", "rresp", "rvalid", "rready"),
)
_CONTROL = "s_axi_control"
_CHECK = """        auto check = [&](const char* path, bool valid, bool ready) {
            if (valid == ready || valid != blocked || length >= size) return;
            const char* what = blocked ? "ready" : "data";
            length += std::snprintf(text + length, size - length, "%s waits for %s; ", path, what);
        };"""


def memory_ports(design: Design) -> tuple[str, ...]:
    """Names of the AXI4 masters, in the order of the ports.

    Raises ValueError where the kernel's clock, reset, interrupt, control port or memory ports are missing.
    """
    names = [port.name for port in design.ports]
    prefixes = (name.rpartition("__")[0] for name in names if re.search("__a[rw]len$", name))
    found = tuple(dict.fromkeys(prefixes))
    missing = {"clk", "rst", "interrupt", f"{_CONTROL}__awvalid", f"{_CONTROL}__arvalid"} - set(names)
    if missing or not found:
        wanted = ", ".join(sorted(missing) or ["an AXI4 master"])
        raise ValueError(f"a kernel must have the ports {wanted}, not just {', '.join(names)}")
    return found


def pins_header(design: Design) -> str:
    """The text of pins.hpp: a class of pins for each memory port, the control port, and the tuple of all ports."""
    ports = {port.name: port for port in design.ports}
    names = memory_ports(design)
    lines = ["#pragma once", "#include <tuple>"]
    for index, name in enumerate(names):
        data = ports.get(f"{name}__wdata") or ports[f"{name}__rdata"]
        lines += _pins(f"Pins{index}", name, _AXI4, ports)
        lines += [f"    static constexpr int bytes = {data.width // 8};"]
        lines += [f'    static constexpr const char* name = "{name}";']
        lines += [_bytes_accessor(name, "rdata", ports), _bytes_accessor(name, "wdata", ports), "};"]
    lines += [*_pins("ControlPins", _CONTROL, _LITE, ports), "};"]
    types = ", ".join(f"AxiPort<Pins{index}>" for index in range(len(names)))
    values = ", ".join(f"AxiPort<Pins{index}>(top, memory, {index})" for index in range(len(names)))
    revision = "top.git_revision = value;" if "git_revision" in ports else "(void)top, (void)value;"
    return "\n".join(
        [
            *lines,
            f"using Ports = std::tuple<{types}>;",
            f"inline Ports make_ports(Vtop& top, Memory& memory) {{ return Ports({values}); }}",
            "struct Control : LiteMaster<ControlPins> {",
            "    explicit Control(Vtop& top) : LiteMaster<ControlPins>{ControlPins{top}} {}",
            "};",
            f"inline bool interrupt_pin(const Vtop& top) {{ return top.{ports['interrupt'].member}; }}",
            f"inline void set_git_revision(Vtop& top, uint32_t value) {{ {revision} }}",
            "",
        ]
    )


def waits_header(design: Design, root_header: str) -> str:
    """The text of waits.hpp: which streams inside the model wait, found in the header that Verilator wrote.

    A stream waits for ready when valid is high and ready low, for data when ready is high and valid low. Outer streams
    come first, and of those at one depth the ones that wait for ready: the list begins where a reader would look.
    """
    members = set(re.findall(r"\bCData/\*0:0\*/ (\w+);", root_header))
    levels: dict[int, list[str]] = {}
    for stream in design.streams:
        valid, ready = ("__DOT__".join(encode(part) for part in wire) for wire in (stream.valid, stream.ready))
        if {valid, ready} <= members:
            line = f'        check("{stream.path}", root.{valid}, root.{ready});'
            levels.setdefault(stream.path.count("."), []).append(line)
    body = []
    for _, lines in sorted(levels.items()):
        body += ["    for (bool blocked : {true, false}) {", _CHECK, *lines, "    }"]
    return "\n".join(
        [
            "#pragma once",
            "#include <cstdio>",
            '#include "Vtop___024root.h"',
            "inline void internal_waits(Vtop& top, char* text, int size) {",
            "    auto& root = *top.rootp;",
            "    int length = 0;",
            "    (void)root, (void)length;",
            *body,
            "}",
            "",
        ]
    )


def streams_configuration(design: Design) -> str:
    """The Verilator configuration that keeps the handshakes of the streams inside readable."""
    wires = {wire for stream in design.streams for wire in (stream.valid, stream.ready)}
    places = sorted({(design.representative(".".join(path)), name) for *path, name in wires})
    lines = (f'public_flat_rd -module "{module}" -var "{name}"' for module, name in places)
    return "\n".join(["`verilator_config", *lines, ""])


def _pins(struct: str, prefix: str, signals: tuple[str, ...], ports: dict[str, Port]) -> list[str]:
    lines = [f"struct {struct} {{", "    Vtop& top;"]
    for signal in signals:
        port = ports.get(f"{prefix}__{signal}")
        if port:
            lines.append(f"    auto& {signal}() {{ return top.{port.member}; }}")
        else:
            lines += [f"    uint8_t {signal}_ = 0;", f"    auto& {signal}() {{ return {signal}_ = 0; }}"]
    return lines


def _bytes_accessor(prefix: str, signal: str, ports: dict[str, Port]) -> str:
    port = ports.get(f"{prefix}__{signal}")
    pointer = f"reinterpret_cast<uint8_t*>(&top.{port.member})" if port else "nullptr"
    return f"    uint8_t* {signal}() {{ return {pointer}; }}"
