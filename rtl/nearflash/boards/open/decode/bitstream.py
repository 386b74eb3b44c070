"""From a .bit file to its netlist."""

from pathlib import Path
from tempfile import TemporaryDirectory

from nearflash.abi.errors import FormatError
from nearflash.boards.open.database import PartDatabase
from nearflash.boards.open.decode.features import decode_bits
from nearflash.boards.open.decode.netlist import DecodedNetlist
from nearflash.boards.open.frames import Place, read_bits
from nearflash.boards.open.packages import SidPrograms

__all__ = ["decode_netlist", "list_bits"]


def list_bits(programs: SidPrograms, database: PartDatabase, bitstream: Path) -> set[Place]:
    """The bits that a .bit file sets. Raises ToolsError where prjxray's `bitread` does not read it."""
    with TemporaryDirectory() as work:
        log = Path(work) / "bitread.log"
        return read_bits(programs.run("bitread", f"--part_file={database.part_file}", "-y", bitstream, log=log))


def decode_netlist(database: PartDatabase, bits: set[Place]) -> DecodedNetlist:
    """The netlist of set bits. Raises FormatError for a bit that no feature of the part explains, or for no netlist."""
    decoded = decode_bits(database, bits)
    if decoded.unexplained:
        frame, word, bit = min(decoded.unexplained)
        raise FormatError(
            f"each set bit must belong to a feature of {database.part}, but {len(decoded.unexplained)} do not: the "
            f"first is {frame:#010x}.{word}.{bit}"
        )
    return DecodedNetlist(database, decoded.features)
