"""`nearflash bitstream estimate`: the manifest of a kernel that no vendor tool built, from a synthesis by Yosys.

The manifest states resources and the longest path with the evidence level "synthesised"; it names no files and no
Fmax. The board's limits hold for it as for a routed one.
"""

import importlib.metadata
import subprocess
from pathlib import Path

from nearflash.boards.vendor.kernel import convert_kernel
from nearflash.device.bitstreams.board import Board, Resources
from nearflash.device.bitstreams.manifest import BuildManifest
from nearflash.support.files import PUBLIC_MODE, write_durably
from nearflash.verify.synth import kernel_resources

__all__ = ["estimate"]


def estimate(board: Board, kernel: str) -> BuildManifest:
    """Synthesise a kernel for a board's family and write its manifest into the board's folder.

    Raises ConfigError for a kernel that the board does not have, BitstreamError for one that exceeds the limits: then
    nothing is written.
    """
    build = board.build(kernel)
    units = kernel_resources(build, board.family)
    manifest = BuildManifest(
        board=board.name, config=build.full_name, digest=build.digest, design=convert_kernel(build).digest,
        git=_revision(), tools={name: importlib.metadata.version(name) for name in ("amaranth", "pyosys")}, files={},
        utilisation=Resources(units.lut, units.ff, units.dsp, units.bram36), clock_hz=board.clock_hz, fmax_hz=0,
        critical_path=units.path, evidence="synthesised", logic_depth=units.logic_depth,
    )  # fmt: skip
    manifest.check_limits(board)
    write_durably(board.folder / f"{kernel}.json", manifest.to_json(), mode=PUBLIC_MODE)
    return manifest


def _revision() -> str:
    """Revision of the sources, zeros outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "0" * 40
