"""Runs a vendor's tools over a package and keeps what they made, with its manifest, in the board's folder.

Vivado boards: the bitstream, the handoff out of the .xsa, and figures of the routed design (evidence "routed"). Vitis
boards: the xclbin with one manifest a kernel; v++ reports no figures of a kernel by itself, so the manifests keep those
of the synthesis by Yosys (evidence "synthesised").
"""

import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nearflash.abi.errors import BitstreamError
from nearflash.boards.vendor.connectivity import MEMORY_BANK
from nearflash.boards.vendor.kernel import KernelDesign
from nearflash.device.bitstreams.board import Board, Resources
from nearflash.device.bitstreams.header import Label
from nearflash.device.bitstreams.manifest import BuildManifest, load_manifest, sha256
from nearflash.support.files import PUBLIC_MODE, copy_durably, write_durably

__all__ = ["commands", "keep_bitstream", "keep_xclbin", "run_tools"]

_PROGRAMS = {
    "vivado": "vivado (AMD Vivado 2021.1 or later with the part {part}; source its settings64.sh)",
    "vitis": "v++ (AMD Vitis 2021.1 or later, its settings64.sh sourced, with the platform {platform} in "
    "PLATFORM_REPO_PATHS)",
}
_XCLBIN = "nearflash.xclbin"


def commands(board: Board, designs: list[KernelDesign]) -> list[list[str]]:
    """List what is run in the package's folder, in order."""
    scripts = [f"package_{design.top}.tcl" for design in designs] + (["system.tcl"] if board.flow == "vivado" else [])
    runs = [["vivado", "-mode", "batch", "-nojournal", "-log", f"{name}.log", "-source", name] for name in scripts]
    if board.flow == "vitis":
        kernels = [f"{design.top}.xo" for design in designs]
        runs.append(["v++", "-l", "-t", "hw", "--config", "connectivity.cfg", "-o", _XCLBIN, *kernels])
    return runs


def run_tools(board: Board, designs: list[KernelDesign], folder: Path) -> None:
    """Run the tools over the package in `folder`.

    Raises BitstreamError that lists the programs that are missing, or names the one that failed and its output.
    """
    runs = commands(board, designs)
    missing = [name for name in ("vivado", "v++") if any(run[0] == name for run in runs) and not shutil.which(name)]
    if missing:
        texts = [_PROGRAMS["vitis" if name == "v++" else name] for name in missing]
        needed = " and ".join(text.format(part=board.part, platform=board.platform) for text in texts)
        raise BitstreamError(f"{board.name} must be built by {needed}, not found on PATH; the package is in {folder}")
    for run in runs:
        log = folder / f"{run[0]}.out"
        with log.open("w") as sink:
            done = subprocess.run(run, cwd=folder, stdout=sink, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            text = log.read_text(errors="replace")[-1500:]
            raise BitstreamError(
                f"`{' '.join(run)}` must succeed in {folder}, not exit with {done.returncode}:\n{text}"
            )


def keep_bitstream(
    board: Board, design: KernelDesign, folder: Path, git: str, tools: Mapping[str, str]
) -> BuildManifest:
    """Copy a Vivado build into the board's folder with its manifest.

    Raises BitstreamError where a file is missing, timing was not met, or the board's limits are exceeded: then nothing
    is copied.
    """
    stem = design.top
    bitstream, handoff, archive = (folder / f"{stem}.{suffix}" for suffix in ("bit", "hwh", "xsa"))
    missing = [path.name for path in (bitstream, archive, folder / f"{stem}.figures") if not path.is_file()]
    if missing:
        raise BitstreamError(f"system.tcl must write {', '.join(missing)} into {folder}, not end without")
    figures = _figures(folder / f"{stem}.figures")
    with zipfile.ZipFile(archive) as members:
        handoff.write_bytes(members.read("system.hwh"))
    slack_ns = float(figures["slack"])
    if slack_ns < 0:
        raise BitstreamError(
            f"{design.build.full_name} must meet timing at {board.clock_hz} Hz, not miss it by {-slack_ns} ns"
        )
    Label(design.build.kernel, design.build.full_name, design.build.digest, design.digest).write(bitstream, bitstream)
    manifest = BuildManifest(
        board=board.name, config=design.build.full_name, digest=design.build.digest, design=design.digest, git=git,
        tools=tools, files={path.name: sha256(path) for path in (bitstream, handoff)},
        utilisation=Resources(
            int(figures["lut"]), int(figures["ff"]), int(figures["dsp"]),
            int(figures["ramb36"]) + int(figures["ramb18"]) / 2,
        ),
        clock_hz=board.clock_hz, fmax_hz=int(1e9 / (1e9 / board.clock_hz - slack_ns)),
        critical_path=(figures["startpoint_pin"], figures["endpoint_pin"]), evidence="routed",
        timing_model="Vivado",
    )  # fmt: skip
    manifest.check_limits(board)
    for path in (bitstream, handoff):
        copy_durably(path, board.folder / path.name, mode=PUBLIC_MODE)
    write_durably(board.folder / f"{design.top}.json", manifest.to_json(), mode=PUBLIC_MODE)
    return manifest


def keep_xclbin(board: Board, designs: list[KernelDesign], folder: Path, git: str, tools: Mapping[str, str]) -> None:
    """Copy a Vitis build into the board's folder, and its name into the manifest of each kernel.

    Raises BitstreamError where a kernel has no manifest of a synthesis yet.
    """
    xclbin = folder / _XCLBIN
    if not xclbin.is_file():
        raise BitstreamError(f"{xclbin} must exist after v++ linked memory {MEMORY_BANK}, not be missing")
    digest = sha256(xclbin)
    manifests = [
        replace(load_manifest(board, design.top), design=design.digest, digest=design.build.digest, git=git,
                files={_XCLBIN: digest}, tools=tools)
        for design in designs
    ]  # fmt: skip
    copy_durably(xclbin, board.folder / _XCLBIN, mode=PUBLIC_MODE)
    for manifest in manifests:
        write_durably(board.folder / f"{manifest.kernel}.json", manifest.to_json(), mode=PUBLIC_MODE)


def _figures(path: Path) -> dict[str, str]:
    """Names and values that system.tcl wrote."""
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
