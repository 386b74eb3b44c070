"""The bitstreams that are in the repository are those of this checkout: files, part, configuration, design, limits."""

import pytest

from nearflash.abi.kernel.config import config
from nearflash.boards.open.build import CLOCK_DERATING, MARGIN, TIMING_MODELS, design_digest
from nearflash.boards.open.database import open_database
from nearflash.boards.open.decode.bitstream import list_bits
from nearflash.boards.open.decode.cells import load_view
from nearflash.boards.open.decode.compare import check_bits
from nearflash.boards.open.fasm import Feature
from nearflash.boards.open.packages import find_programs
from nearflash.device.bitstreams import boards, load_board, load_manifest
from nearflash.device.bitstreams.header import split_bit
from nearflash.device.bitstreams.manifest import EVIDENCE, PLACES

#: Kernels of boards of the open flow that were built.
BUILT = [
    (board.name, config(name).kernel)
    for board in map(load_board, boards())
    for name in board.kernels
    if board.flow == "open" and (board.folder / f"{config(name).kernel}.json").exists()
]
CONVERTED = {("pynq-z2", "update"), ("pynq-z2", "expand")}
"""Those whose design `make test` makes again."""
FILE_BYTES_MAX = 5_000_000

if not BUILT:
    pytest.skip("no bitstream is committed: make bitstream builds them", allow_module_level=True)


@pytest.fixture(params=BUILT, ids="/".join)
def built(request):
    """A board and the manifest of one of its kernels."""
    name, kernel = request.param
    board = load_board(name)
    return board, load_manifest(board, kernel)


def test_files_are_those_of_the_manifest_and_within_the_limits(built):
    board, manifest = built
    manifest.verify()
    manifest.check_limits(board)
    assert manifest.files.keys() >= {manifest.file(".bit").name, manifest.file(".hwh").name}
    assert all((board.folder / name).stat().st_size <= FILE_BYTES_MAX for name in manifest.files)


def test_the_bitstream_is_for_the_boards_part(built):
    board, manifest = built
    header = split_bit(manifest.file(".bit"))[0]
    assert header.part == board.part
    assert header.payload_bytes > 2_000_000


@pytest.mark.parametrize(
    "built",
    [pytest.param(one, marks=[pytest.mark.full] * (one not in CONVERTED)) for one in BUILT],
    ids="/".join,
    indirect=True,
)
def test_the_design_is_this_checkouts(built):
    board, manifest = built
    again = f"run `make bitstream BOARD={board.name} KERNEL={manifest.kernel}`"
    assert design_digest(board.build(manifest.kernel)) == manifest.design, f"the gateware changed since: {again}"


def test_the_manifest_states_clock_path_and_tools(built):
    board, manifest = built
    slices = board.routing[manifest.kernel].slice_delays
    assert EVIDENCE.index(manifest.evidence) >= EVIDENCE.index("routed")
    assert (manifest.derating, manifest.timing_model) == (CLOCK_DERATING[slices], TIMING_MODELS[slices])
    assert 0 < manifest.clock_hz <= min(manifest.derating * manifest.fmax_hz, MARGIN * manifest.decoded_fmax_hz)
    assert len(manifest.critical_path) >= 3 and "ns" in manifest.critical_path[0]
    assert {"amaranth", "yosys", "nextpnr-himbaechel-xilinx", "prjxray"} <= manifest.tools.keys()
    assert f"{manifest.clock_hz / 1e6:.6f}" in manifest.file(".hwh").read_text()
    assert manifest.digest in manifest.file(".hwh").read_text()


def test_dsp_slices_have_their_ties(built):
    """Regression: eight control pins of each slice were open, and products ignored a factor on silicon."""
    board, manifest = built
    programs = find_programs()
    if programs is None:
        pytest.skip("programs of Debian sid were not fetched: make bitstream fetches them")
    if PLACES not in "".join(manifest.files):
        pytest.skip(f"{manifest.kernel}.bit is from before the ties: bitstreams/pynq-z2/README.md says so")
    database = open_database(programs, board.part)
    bits = list_bits(programs, database, manifest.file(".bit"))
    cells = load_view(manifest.file(".xz").read_bytes())
    slices = [key for key, cell in cells.items() if cell.kind == "DSP48E1"]
    assert len(slices) == manifest.utilisation.dsp
    for key in slices:
        tile, number = key.partition("/")[0], key[-len("0.DSP48E1")]
        for pin in (*(f"INMODE{bit}" for bit in range(5)), "ALUMODE2", "ALUMODE3", "OPMODE6"):
            level = {"0": "GND", "1": "VCC"}[cells[key].inputs[pin]]
            tie = database.bits(Feature(tile, f"DSP_{number}_{pin}.DSP_{level}_{tile[4]}"))
            assert {(bit.frame, bit.word, bit.bit) for bit in tie if bit.is_set} <= bits


@pytest.mark.full
def test_the_bits_are_the_routed_netlist(built):
    """In `make test`, test_flow.py does this for a small design."""
    board, manifest = built
    programs = find_programs()
    if programs is None or PLACES not in "".join(manifest.files):
        pytest.skip("needs the programs of Debian sid, and a bitstream with the netlist that was routed")
    database = open_database(programs, board.part)
    bits = list_bits(programs, database, manifest.file(".bit"))
    check_bits(database, bits, load_view(manifest.file(".xz").read_bytes()))
