"""The git revision that a design states in its identity registers."""

import subprocess
from pathlib import Path

from nearflash.abi.errors import BitstreamError
from nearflash.device.bitstreams.board import Board
from nearflash.device.bitstreams.manifest import load_manifest

__all__ = ["revision_of", "stamp"]


def stamp(text: str, git_revision: int, name: str = "design") -> str:
    """RTLIL of a design of revision 0, with the first 32 bits of its sources' revision in its identity registers.

    name: of the design, for errors. Raises BitstreamError for a revision that does not fit, a text without its place.
    """
    if not 0 <= git_revision < 1 << 32:
        raise BitstreamError(f"git_revision must be 32 bits, not {git_revision!r}")
    place = "connect \\git_revision 32'"
    if f"{place}{0:032b}" not in text:
        raise BitstreamError(f"{name} must have a git revision of 0, not none")
    return text.replace(f"{place}{0:032b}", f"{place}{git_revision:032b}")


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
