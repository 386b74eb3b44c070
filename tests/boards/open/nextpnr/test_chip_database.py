"""What is corrected in nextpnr's chip database, on a file of a few tiles."""

import struct

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.nextpnr.chip_database import correct
from nearflash.boards.open.nextpnr.chip_file import ChipFile
from nearflash.boards.open.nextpnr.slice_timing import SliceDelays
from nearflash.boards.open.nextpnr.timing import BlockDelays

BETWEEN, OUTBOUND, OUTPUT, PIN = 11, 22, 23, 27  # kinds, of nextpnr's own names
FABRIC = {
    "INT_L": {"LOGIC_OUTS_L0": OUTBOUND, "IMUX_L0": PIN},
    "INT_INTERFACE_L": {"INT_INTERFACE_BLOCK_OUTS_L_B0": BETWEEN},
}
BLOCK = {"PSS2": {"PS7_FCLKCLK0": OUTPUT, "PSS1_LOGIC_OUTS0_0": OUTBOUND, "PSS1_IMUX0": PIN}}


def test_outputs_inside_the_block_become_wires_between_it_and_the_fabric(tmp_path, chip_file):
    (tmp_path / "chip.bin").write_bytes(chip_file(FABRIC | BLOCK))
    assert correct(tmp_path / "chip.bin", tmp_path / "made.bin", {}) == 2
    block = {"PSS2": {"PS7_FCLKCLK0": BETWEEN, "PSS1_LOGIC_OUTS0_0": BETWEEN, "PSS1_IMUX0": PIN}}
    assert (tmp_path / "made.bin").read_bytes() == chip_file(FABRIC | block)


def test_a_device_without_a_processor_stays_as_it_is(tmp_path, chip_file):
    (tmp_path / "chip.bin").write_bytes(chip_file(FABRIC))
    assert correct(tmp_path / "chip.bin", tmp_path / "made.bin", {}) == 0
    assert (tmp_path / "made.bin").read_bytes() == chip_file(FABRIC)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda chip_file: chip_file(FABRIC | BLOCK, version=7), "of version 6, not 0xca7ca7, 7"),
        (lambda chip_file: chip_file(FABRIC | BLOCK, magic=1), "of version 6, not 0x1, 6"),
        (lambda chip_file: chip_file(FABRIC | BLOCK)[:200], "of version 6: "),
        (lambda chip_file: b"", "of version 6: "),
        (
            lambda chip_file: chip_file({"INT_L": FABRIC["INT_L"]} | BLOCK),
            "with the wire INT_INTERFACE_BLOCK_OUTS_L_B0 ",
        ),
    ],
    ids=["version", "magic", "cut short", "empty", "no such kind"],
)
def test_another_file_is_an_error_and_nothing_is_written(tmp_path, chip_file, made, message):
    (tmp_path / "chip.bin").write_bytes(made(chip_file))
    with pytest.raises(FormatError, match=f"chip.bin must be a chip database {message}"):
        correct(tmp_path / "chip.bin", tmp_path / "made.bin", {})
    assert not (tmp_path / "made.bin").exists()


SLICE = {"DSP_L": {"DSP48_X0Y0.DSP48E1": (118, {
    "DSP48_X0Y0.A0": 16, "DSP48_X0Y0.A1": 15, "DSP48_X0Y0.P0": 40, "DSP48_X0Y0.P1": 41, "DSP48_X0Y0.CEA2": 50,
    "DSP48_X0Y0.CLKINV_OUT": 22,
})}}  # fmt: skip
DELAYS = BlockDelays(
    paths={("A", "P"): 3841}, setups={("A", "CLK"): 362, ("CEA2", "CLK"): 497}, launches={("CLK", "P"): 434}
)


def tables(content):
    """Delays by kind and pin of the first speed grade, read as nextpnr does: {kind: {pin: (clock?, paths, edges)}}."""

    def numbers(offset, count):
        return struct.unpack_from(f"<{count}i", content, offset)

    def array(offset, item_bytes):
        first, items = numbers(offset, 2)
        return [offset + first + item_bytes * at for at in range(items)]

    grade = array(numbers(0, 1)[0] + 68, 28)[0]
    found = {}
    for cell in array(grade + 20, 12):
        pins = {}
        for pin in array(cell + 4, 24):
            number, clock = numbers(pin, 2)
            pins[number] = (clock, [numbers(arc, 5) for arc in array(pin + 8, 20)],
                            [numbers(arc, 14) for arc in array(pin + 16, 56)])  # fmt: skip
        assert list(pins) == sorted(pins), "nextpnr searches by halves"
        found[numbers(cell, 1)[0]] = pins
    assert list(found) == sorted(found)
    return found


@pytest.fixture
def timed(tmp_path, chip_file):
    """Delays of a database of one DSP slice, whose tables are those of kinds 2 and 54 before, by name or kind."""
    (tmp_path / "chip.bin").write_bytes(chip_file(FABRIC, blocks=SLICE, kinds=(2, 54)))
    other = BlockDelays(paths={("A1", "P"): 77})
    correct(tmp_path / "chip.bin", tmp_path / "made.bin", {
        "DSP48E1_0": DELAYS, "DSP48E1_1": other, "PS7_0": BlockDelays()
    })  # fmt: skip
    content = (tmp_path / "made.bin").read_bytes()
    return {ChipFile(bytearray(content)).name(kind) or kind: pins for kind, pins in tables(content).items()}


def test_each_type_of_a_hard_block_gets_its_delays(timed):
    # Regression: Fmax left out every path that began, ended or passed at a DSP slice or the processor block.
    pins = timed["DSP48E1_0"]
    assert pins.keys() == {15, 16, 22, 40, 41, 50}
    assert pins[22] == (1, [], [])
    for output in (40, 41):
        assert pins[output] == (0, [(15, *[3841] * 4), (16, *[3841] * 4)], [(22, 0, *[0] * 8, *[434] * 4)])
    assert pins[15] == pins[16] == (0, [], [(22, 0, *[362] * 4, *[0] * 8)])
    assert pins[50] == (0, [], [(22, 0, *[497] * 4, *[0] * 8)])
    assert timed["DSP48E1_1"] == dict.fromkeys((40, 41), (0, [(15, *[77] * 4)], []))


def test_delays_that_are_there_stay(timed, tmp_path):
    before = tables((tmp_path / "chip.bin").read_bytes())
    assert timed.keys() == {2, "DSP48E1_0", "DSP48E1_1", 54} and {kind: timed[kind] for kind in before} == before
    assert before[2][1] == (0, [], [(40, 0, *[2] * 12)])


LUTS = {"CLBLM_R": {
    "SLICE_X0Y0.A6LUT": (1, {"SLICE_X0Y0.A1": 16, "SLICE_X0Y0.CLKINV_OUT": 22, "SLICE_X0Y0.A6LUT_O6": 38}),
    "SLICE_X1Y0.A5LUT": (1, {"SLICE_X1Y0.A1": 16, "SLICE_X1Y0.A5LUT_O5": 37}),
}}  # fmt: skip
TILE = {"CLBLM_R": dict.fromkeys(("CLBLM_M_A1", "CLBLM_M_A", "SLICE_X0Y0.A", "SLICE_X0Y0.AX", "SLICE_X0Y0.AMUX"), 0)}
PIPS = [
    ("CLBLM_M_A1", "SLICE_X0Y0.A1"), ("CLBLM_M_A1", "CLBLM_M_A"), ("SLICE_X0Y0.A6LUT_O6", "SLICE_X0Y0.AMUX"),
    ("SLICE_X0Y0.A6LUT_O6", "SLICE_X0Y0.A"), ("SLICE_X0Y0.A", "CLBLM_M_A"), ("SLICE_X0Y0.AX", "SLICE_X0Y0.AMUX"),
]  # fmt: skip
LUT = BlockDelays(paths={("A1", "A6LUT_O6"): 124, ("A1", "A5LUT_O5"): 156}, launches={("CLK", "A6LUT_O6"): 1472})
SLICES = SliceDelays(
    pins={"CLBLM_M_A1": 531}, inside={("A6LUT_O6", "AMUX"): 241, ("A6LUT_O6", "A"): 0},
    tables={("A6LUT", "A5LUT"): LUT}, through=124,
)  # fmt: skip


def pip_delays(content):
    """Delay of each connection of the first tile, ps, and the flags of its kind; None: of the kind that was there."""

    def numbers(offset, count):
        return struct.unpack_from(f"<{count}i", content, offset)

    tile, grade = (offset + numbers(offset, 1)[0] for offset in (32, 72))
    first, kinds = numbers(grade + 4, 2)
    pips, count = numbers(tile + 20, 2)
    found = []
    for at in range(count):
        kind = numbers(tile + 20 + pips + 24 * at + 16, 1)[0]
        *delays, flags = numbers(grade + 4 + first + 52 * kind, 13)
        assert kind < kinds and delays[:4] == delays[:1] * 4 and not any(delays[4:])
        found.append((delays[0], flags) if kind else None)
    return found


def test_slices_get_delays_of_their_pins_connections_and_cells(tmp_path, chip_file):
    # Regression: every pin of a LUT was 20 ps, where prjxray has 2 to 540; memories in LUTs had no clock to output.
    (tmp_path / "chip.bin").write_bytes(
        chip_file(TILE | {"INT_L": {"IMUX_L0": PIN}}, blocks=LUTS, kinds=(1, 2), pips={"CLBLM_R": PIPS})
    )
    correct(tmp_path / "chip.bin", tmp_path / "made.bin", {}, (), SLICES)
    content = (tmp_path / "made.bin").read_bytes()
    assert pip_delays(content) == [(531, 1), (531 + 124, 1), (241, 1), (0, 1), (0, 1), None]
    assert tables(content)[1] == {
        22: (1, [], []),
        37: (0, [(16, *[156] * 4)], []),
        38: (0, [(16, *[124] * 4)], [(22, 0, *[0] * 8, *[1472] * 4)]),
    }
    assert tables(content)[2] == tables((tmp_path / "chip.bin").read_bytes())[2], "of another type of cell"
