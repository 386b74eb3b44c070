"""The git revision that a design states in its identity registers."""

import subprocess
from pathlib import Path

from nearflash.abi.errors import BitstreamError
from nearflash.device.bitstreams.board import Board
from nearflash.device.bitstreams.manifest import load_manifest

__all__ = ["revision_of"]


def revision_of(board: Board, kernel: str, design: str) -> str:
    """Revision that the bitstream states: that of its manifest where the design is the same, else the checkout's.

    So a build from a later checkout that changed nothing of the design gives the same bitstream.
    """
    try:
        manifest = load_manifest(board, kernel)
    except BitstreamError:
        manifest = None
    if manifest is not None and manifest.design == design:
        return manifest.git
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(head, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0" * 40
