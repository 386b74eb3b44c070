"""A .bit file as a library that runs it, kept in the build cache by the file's digest."""

from pathlib import Path

from nearflash.boards.open.database import open_database
from nearflash.boards.open.decode.bitstream import decode_netlist, list_bits
from nearflash.boards.open.decode.emit import emit
from nearflash.boards.open.packages import fetch
from nearflash.device.bitstreams.board import Board
from nearflash.device.bitstreams.manifest import BuildManifest
from nearflash.support.cache import build_once
from nearflash.support.native import build_library

__all__ = ["FOLDER", "compile_bitstream"]

_FLAGS = ("-std=c++17", "-O1", "-fPIC")
FOLDER = Path(__file__).parent
#: Where `blocks.hpp` and `processor.hpp` are.


def compile_bitstream(board: Board, manifest: BuildManifest) -> Path:
    """The library of a kernel's .bit file, which is checked against its manifest first.

    Raises BitstreamError for another file, ToolsError without the programs, CompileError without a compiler,
    FormatError as `decode_netlist` and `emit`.
    """
    manifest.verify()
    bitstream = manifest.file(".bit")

    def build(work: Path) -> None:
        programs = fetch()
        database = open_database(programs, board.part)
        netlist = decode_netlist(database, list_bits(programs, database, bitstream))
        (work / "design.cpp").write_text(emit(netlist.cells()))

    sources = [path.read_text() for path in sorted(FOLDER.glob("*.py"))]
    kept = build_once(f"decoded-{manifest.config}", [manifest.files[bitstream.name], *sources], build)
    text = (kept / "design.cpp").read_text()
    return build_library(f"bit-{manifest.config}", text, "a decoded bitstream", _FLAGS, folders=(FOLDER,))
