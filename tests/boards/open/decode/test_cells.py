"""LUTs as functions of nets, and cells as a file."""

import itertools

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.cells import Cell, collect, load_view, make_lut, save_view


def evaluate(cell, values):
    index = sum(values[net] << place for place, net in enumerate(cell.inputs.values()))
    return cell.config["table"] >> index & 1


@pytest.mark.parametrize("nets", [("b", "a", "c"), ("a", "a", "b"), ("1", "a", "0"), ("a", "b", "a"), ("0", "1", "1")])
@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0xAA, 0xFF, 0x01])
def test_a_lut_is_the_same_function_of_its_nets(table, nets):
    cell = make_lut(table, nets)
    for values in itertools.product((0, 1), repeat=3):
        known = dict(zip("abc", values, strict=True)) | {"0": 0, "1": 1}
        index = sum(known[net] << place for place, net in enumerate(nets))
        assert evaluate(cell, known) == table >> index & 1
    names = list(cell.inputs.values())
    assert names == sorted(set(names) - {"0", "1"}), "each net once, in order, and no constant"
    for place, net in enumerate(names):
        table_, step = cell.config["table"], 1 << place
        changes = [bit for bit in range(1 << len(names)) if (table_ >> bit ^ table_ >> (bit ^ step)) & 1]
        assert changes, f"{net} changes nothing"


def test_equal_functions_are_equal_cells():
    assert make_lut(0x8, ["a", "b"]) == make_lut(0x8, ["b", "a"]) == make_lut(0x80, ["1", "b", "a"])
    assert make_lut(0x2, ["a", "b"]) != make_lut(0x2, ["b", "a"])


def test_constants_and_ways_through_luts_are_no_cells():
    cells = {"ff": Cell("FF", {}, {"D": "sum"}), "sum": make_lut(0x8, ["way", "one"]), "way": make_lut(0x2, ["ff"]),
             "one": make_lut(0x3, ["ff"])}  # fmt: skip
    assert collect(["ff"], cells.get, lambda key: True) == {"ff": Cell("FF", {}, {"D": "ff"})}
    ground = {"ff": Cell("FF", {}, {"D": "ff", "CK": "clock"}), "clock": Cell("BUFGCTRL", {}, {"I0": "0"})}
    assert collect(["ff"], ground.get, lambda key: True)["ff"].inputs == {"D": "ff", "CK": "0"}
    kept = collect(["ff"], cells.get, lambda key: key == "sum")
    assert kept == {"ff": Cell("FF", {}, {"D": "way"}), "way": make_lut(0x2, ["ff"])}


def test_a_view_is_a_file():
    cells = {"ff": Cell("FF", {"init": 1}, {"D": "ff"})}
    assert load_view(save_view(cells)) == cells and save_view(cells) == save_view(dict(cells))
    for content in (b"", b"junk", save_view(cells)[:-4]):
        with pytest.raises(FormatError, match="a routed netlist must be one that a build wrote, not this file"):
            load_view(content)


def test_a_signal_over_a_clock_buffer_is_a_wire_and_a_clock_is_not():
    """Regression: nextpnr sent the write enable of 39 memories of attend over a free global buffer."""
    cells = {
        "ff": Cell("FF", {}, {"D": "free.BUFGCTRL", "CK": "clock.BUFGCTRL"}),
        "free.BUFGCTRL": Cell("BUFGCTRL", {}, {"I0": "ff"}),
        "clock.BUFGCTRL": Cell("BUFGCTRL", {}, {"I0": "P/PS7_X0Y0.PS7:FCLKCLK0"}),
    }
    found = collect(["ff"], cells.get, lambda key: True)
    assert found == {
        "ff": Cell("FF", {}, {"D": "ff", "CK": "clock.BUFGCTRL"}),
        "clock.BUFGCTRL": cells["clock.BUFGCTRL"],
    }
    assert collect(["ff"], cells.get, lambda key: False) == cells
