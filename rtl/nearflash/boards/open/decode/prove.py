"""`nearflash bitstream prove`: a bitstream is decoded, compared with its routed netlist place by place, and run."""

from dataclasses import asdict, dataclass, replace

from nearflash.abi.errors import BitstreamError
from nearflash.boards.open.database import PartDatabase, open_database
from nearflash.boards.open.decode.bitstream import list_bits
from nearflash.boards.open.decode.cells import load_view
from nearflash.boards.open.decode.compare import list_differences
from nearflash.boards.open.decode.device import BitstreamDevice
from nearflash.boards.open.decode.features import decode_bits
from nearflash.boards.open.decode.mutants import BitMutants
from nearflash.boards.open.decode.netlist import DecodedNetlist
from nearflash.boards.open.decode.timing import time_bits
from nearflash.boards.open.frames import Place
from nearflash.boards.open.packages import fetch
from nearflash.device.bitstreams.board import Board
from nearflash.device.bitstreams.manifest import EVIDENCE, PLACES, BuildManifest, load_manifest
from nearflash.device.selftest.run import compare
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["LEVEL", "BitstreamProof", "prove"]

LEVEL = "proved by decoding"
"""The evidence level of a bitstream whose proof has no fault."""
_SIZES = {"params": 20, "tokens": 64, "columns": 64}
"""Of the self test: a decoded design runs some ten thousand cycles a second."""


@dataclass(frozen=True)
class BitstreamProof:
    """Figures of a kernel's proof; all but the clocks are counts."""

    set_bits: int
    unexplained: int
    """Set bits that are of no feature."""
    undriven_pins: int
    """Input pins of sites in use that nothing drives and whose level is not known."""
    places: int
    """Cells of the routed netlist."""
    differing_places: int
    words: int
    """Words of the self test on the decoded design; those of both levels where a pin has no driver."""
    words_differing: int
    violations: int
    """Bursts that AXI3 forbids, in the self test."""
    mutants: int
    """Bitstreams with one used bit flipped, of which comparing places must see all."""
    mutants_seen: int
    fmax_hz: int
    """Of nextpnr's timing model."""
    decoded_fmax_hz: int
    """Of the decoded netlist, by prjxray's delays."""
    late_endpoints: int
    """Setup checks of the decoded netlist that fail at the manifest's clock."""
    hold_violations: int
    """Its hold checks that fail; no fault of the proof, as the skew between clock regions is an allowance."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        faults = (self.unexplained, self.undriven_pins, self.differing_places, self.words_differing, self.violations,
                  self.late_endpoints)  # fmt: skip
        return not any(faults) and self.words > 0 and self.mutants_seen == self.mutants

    def to_dict(self) -> dict[str, int]:
        """The figures by name."""
        return asdict(self)


def prove(board: Board, kernel: str, *, mutants: int = 200) -> BitstreamProof:
    """Prove the bitstream of a kernel. Its manifest gets the timing, and where the proof holds the evidence level.

    Raises BitstreamError for a bitstream without its routed netlist, which `nearflash bitstream build` makes (minutes
    to an hour), ToolsError without the flow's programs, FormatError for bits that are no design.
    """
    manifest = load_manifest(board, kernel)
    manifest.verify()
    if not any(name.endswith(PLACES) for name in manifest.files):
        raise BitstreamError(
            f"{board.name}/{kernel} must have {kernel}{PLACES}, the netlist that was routed: it was built before there "
            f"was one; build it again: nearflash bitstream build {board.name} --kernel {kernel}"
        )
    programs = fetch()
    database = open_database(programs, board.part)
    bits = list_bits(programs, database, manifest.file(".bit"))
    figures = _compare(database, bits, manifest, mutants)
    timing = time_bits(database, bits)
    late, violations = timing.count_late(manifest.clock_hz), timing.hold_violations
    found = BitstreamProof(
        **figures, **_run(board, manifest, figures["undriven_pins"]), fmax_hz=manifest.fmax_hz,
        decoded_fmax_hz=timing.fmax_hz, late_endpoints=late, hold_violations=violations,
    )  # fmt: skip
    rises = found.holds and EVIDENCE.index(manifest.evidence) < EVIDENCE.index(LEVEL)
    stated = replace(
        manifest, decoded_fmax_hz=timing.fmax_hz, decoded_path=timing.critical_path, late_endpoints=late,
        hold_violations=violations, evidence=LEVEL if rises else manifest.evidence,
    )  # fmt: skip
    if stated != manifest:
        write_durably(board.folder / f"{kernel}.json", stated.to_json(), mode=PUBLIC_MODE)
    return found


def _compare(database: PartDatabase, bits: set[Place], manifest: BuildManifest, mutants: int) -> dict[str, int]:
    """Figures of the bits alone."""
    routed = load_view(manifest.file(".xz").read_bytes())
    decoded = decode_bits(database, bits)
    netlist = DecodedNetlist(database, decoded.features)
    cells = netlist.cells(frozenset(routed))
    drawn = BitMutants(netlist, cells, bits)
    chosen = drawn.sample(mutants)
    return {
        "set_bits": len(bits), "unexplained": len(decoded.unexplained), "undriven_pins": len(netlist.undriven),
        "places": len(routed), "differing_places": len(list_differences(routed, cells)),
        "mutants": len(chosen), "mutants_seen": sum(map(drawn.is_seen, chosen)),
    }  # fmt: skip


def _run(board: Board, manifest: BuildManifest, undriven_pins: int) -> dict[str, int]:
    """Figures of the self test, with pins that nothing drives reading 0, and, where there are such, 1."""
    words = differing = violations = 0
    for level in (0, 1) if undriven_pins else (0,):
        with BitstreamDevice(board, board.build(manifest.kernel), open_level=level) as device:
            for row in compare(device, seed=1, **_SIZES):
                words, differing = words + row.words, differing + row.mismatches
            violations += device.violations
    return {"words": words, "words_differing": differing, "violations": violations}
