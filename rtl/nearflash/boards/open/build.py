"""A bitstream by the open flow: Amaranth, yosys, nextpnr, FASM, frames, .bit, read back and compared; .hwh; manifest.

Equal sources and equal tools give equal files: seeds are fixed, names are those of the design, and no file has a date.
"""

import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from amaranth.back import rtlil

from nearflash.abi.errors import BitstreamError, ConfigError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.boards.design.revision import revision_of
from nearflash.boards.open.database import PartDatabase, open_database
from nearflash.boards.open.decode.cells import View, save_view
from nearflash.boards.open.decode.compare import check_bits
from nearflash.boards.open.decode.detours import lengthen
from nearflash.boards.open.decode.paths import TimingResult
from nearflash.boards.open.decode.routed import read_routed
from nearflash.boards.open.decode.timing import read_pins, time_netlist
from nearflash.boards.open.fasm import Feature, parse
from nearflash.boards.open.frames import Place, assemble, read_bits, write_frames
from nearflash.boards.open.nextpnr.processor_place import processor_pins
from nearflash.boards.open.nextpnr.slice_timing import slice_delays
from nearflash.boards.open.nextpnr.timing import assign_types, block_of
from nearflash.boards.open.packages import SidPrograms, fetch
from nearflash.boards.open.routing import SETTINGS, Routed, constraints, route
from nearflash.boards.open.synthesis import count_cells, synthesise, yosys_version
from nearflash.boards.open.ties import list_ties
from nearflash.boards.zynq7.hwh import dividers, hwh_text
from nearflash.boards.zynq7.top import ZynqTop
from nearflash.device.bitstreams.board import Board, Resources, Routing
from nearflash.device.bitstreams.header import Label, rename_design
from nearflash.device.bitstreams.manifest import PLACES, BuildManifest, sha256
from nearflash.support.files import PUBLIC_MODE, copy_durably, write_durably

__all__ = [
    "CLOCK_DERATING",
    "MARGIN",
    "TIMING_MODELS",
    "Implemented",
    "build",
    "design_digest",
    "design_text",
    "implement",
]

MARGIN = 0.9
"""Fraction of the decoded netlist's Fmax that clocks keep to: for jitter, and what the database has no delays of."""
CLOCK_DERATING = {False: 0.65, True: MARGIN}
"""The same of nextpnr's Fmax, without and with a board's `slice_delays`.

Fmax of decoded netlists was .67 to .72 of what nextpnr computed with its own delays of slices; with prjxray's the two
agree within a few per cent."""
_DETOUR_ROUNDS = 3
"""Of detours for signals that change too early: a pin that has one may have hidden another path."""
TIMING_MODELS = {
    False: "nextpnr, prjxray's delays of DSP slices and PS7; without delays of LUT pins, clock skew, hold times",
    True: "nextpnr, prjxray's delays of slices, their pins, DSP slices and PS7; one corner, hold times unchecked",
}
"""Without and with a board's `slice_delays`."""


@dataclass(frozen=True)
class Implemented:
    """A design on its part."""

    cells: Resources
    routed: Routed
    bitstream: Path
    places: View
    """Its netlist by place, which the bitstream decodes to."""
    timing: TimingResult
    """Of the netlist that the bitstream decodes to."""


def design_text(build_config: KernelConfig, git_revision: int = 0) -> str:
    """RTLIL of a build's whole design; the git revision, its first 32 bits, is what the identity registers read."""
    text: str = rtlil.convert(ZynqTop(build_config, git_revision), name="top", emit_src=False)
    return text


def design_digest(build_config: KernelConfig) -> str:
    """SHA-256 (hex) of the design with the git revision 0: what a manifest compares sources by."""
    return hashlib.sha256(design_text(build_config).encode()).hexdigest()


def build(board: Board, kernel: str, work: Path, programs: SidPrograms | None = None) -> BuildManifest:
    """Build a kernel's bitstream for a board and put it, with its .hwh and manifest, into the board's folder.

    work: folder for what comes between. Files in the board's folder are replaced only when all is done.

    Raises ConfigError for a board of another flow, ToolsError where a program is missing or fails, FormatError for
    features that no one knows, BitstreamError where the bitstream does not read back.
    """
    if board.flow != "open":
        raise ConfigError(f"flow of {board.name} must be open, not {board.flow}")
    build_config = board.build(kernel)
    if kernel not in board.routing:
        raise ConfigError(f"board.toml of {board.name} must have routing.{kernel}, where place and route starts from")
    programs = programs or fetch()
    work.mkdir(parents=True, exist_ok=True)
    database = open_database(programs, board.part)

    design = design_digest(build_config)
    revision = revision_of(board, kernel, design)
    (work / "top.il").write_text(design_text(build_config, int(revision[:8], 16)))
    made = implement(programs, database, work / "top.il", board.family, board.pins, board.routing[kernel])
    label = Label(kernel, build_config.full_name, build_config.digest, design)
    label.write(made.bitstream, work / f"{kernel}.bit")
    timing = made.timing
    derating = CLOCK_DERATING[board.routing[kernel].slice_delays]
    clock = dividers(int(min(derating * made.routed.fmax_hz, MARGIN * (timing.fmax_hz or made.routed.fmax_hz))))
    if timing.hold_violations:
        warnings.warn(
            f"{timing.hold_violations} of {len(timing.hold_slacks_ps)} endpoints hold too short, the worst by "
            f"{-timing.hold_slacks_ps[0]} ps: no clock helps, another seed in board.toml may",
            stacklevel=2,
        )
    (work / f"{kernel}.hwh").write_text(hwh_text(board, build_config, clock))

    (work / f"{kernel}{PLACES}").write_bytes(save_view(made.places))

    files = [work / f"{kernel}{suffix}" for suffix in (".bit", ".hwh", PLACES)]
    manifest = BuildManifest(
        board=board.name, config=build_config.full_name, digest=build_config.digest, design=design, git=revision,
        tools=_versions(programs), files={path.name: sha256(path) for path in files}, utilisation=made.cells,
        clock_hz=clock.clock_hz, fmax_hz=made.routed.fmax_hz, critical_path=made.routed.critical_path,
        evidence="routed", timing_model=TIMING_MODELS[board.routing[kernel].slice_delays], derating=derating,
        decoded_fmax_hz=timing.fmax_hz, decoded_path=timing.critical_path,
        late_endpoints=timing.count_late(clock.clock_hz), hold_violations=timing.hold_violations,
    )  # fmt: skip
    for path in files:
        copy_durably(path, board.folder / path.name, mode=PUBLIC_MODE)
    write_durably(board.folder / f"{kernel}.json", manifest.to_json(), mode=PUBLIC_MODE)
    return manifest


def implement(
    programs: SidPrograms, database: PartDatabase, source: Path, family: str, pins: Mapping[str, str], routing: Routing
) -> Implemented:
    """The module `top` of an RTLIL file as a bitstream beside it, with its ports on `pins`.

    It is read back, decoded, and compared with the netlist that was routed. Raises ToolsError where a program fails,
    FormatError for features that no one knows, BitstreamError where a bit of the bitstream is not what was written, a
    place is not what was routed, or a pin has no driver.
    """
    xdc, frames, bitstream, netlist = (source.with_suffix(suffix) for suffix in (".xdc", ".frm", ".bit", ".json"))
    design = synthesise(source, family, SETTINGS, routing.dsp_adder_bits)
    xdc.write_text(constraints(pins))
    cells = design["modules"]["top"]["cells"]
    counts, used = count_cells(cells), processor_pins(cells)
    delays = assign_types(cells, database.delays("DSP_L"), database.delays("PSS2"))
    if untimed := {block_of(kind) for kind, known in delays.items() if not (known.paths or known.launches)}:
        blocks = ", ".join(sorted(untimed))
        warnings.warn(f"prjxray has no delays of {blocks} for {database.part}: Fmax leaves them out", stacklevel=2)
    netlist.write_text(json.dumps(design))
    slices = None
    if routing.slice_delays:
        slices = slice_delays([database.delays(kind) for kind in ("slicel", "slicem")], database.lut_pins())
    routed, fasm = route(programs, database.part, database.device, netlist, xdc, delays, used, routing, slices)
    placed = json.loads(netlist.with_suffix(".routed.json").read_text())["modules"]["top"]["cells"]
    lines = chain(fasm.read_text().splitlines(), list_ties(database, placed), database.list_required())
    bits, timing = _keep_holds(database, set(parse(lines)))
    write_frames(frames, database.frames(), bits)
    part = [f"--part_file={database.part_file}", f"--part_name={database.part}"]
    programs.run("xc7frames2bit", *part, f"--frm_file={frames}", f"--output_file={bitstream}",
                 log=source.with_suffix(".frames2bit.log"))  # fmt: skip
    rename_design(bitstream, source.stem)
    text = programs.run("bitread", part[0], "-y", bitstream, log=source.with_suffix(".bitread.log"))
    if wrong := bits ^ read_bits(text):
        raise BitstreamError(f"{bitstream} must read back as it was written, but {len(wrong)} bits differ")
    places = read_routed(database, placed)
    check_bits(database, bits, places)
    return Implemented(counts, routed, bitstream, places, timing)


def _keep_holds(database: PartDatabase, features: set[Feature]) -> tuple[set[Place], TimingResult]:
    """The bits of features, with detours for signals that change too early, and their timing."""
    for left in range(_DETOUR_ROUNDS, -1, -1):
        bits = assemble(database, features)
        netlist = read_pins(database, bits)
        timing = time_netlist(netlist)
        removed, added = lengthen(netlist, timing) if left and timing.early_paths else ((), ())
        if not added:
            break
        features = features.difference(removed).union(added)
    return bits, timing


def _versions(programs: SidPrograms) -> dict[str, str]:
    amaranth = importlib.metadata.version("amaranth")
    return {"amaranth": amaranth, "yosys": yosys_version(), **programs.versions}
