"""Cells as C++: a small design behind the processor block answers its registers; what cannot be run is an error."""

import ctypes
from dataclasses import replace

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.cells import Cell, make_lut
from nearflash.boards.open.decode.emit import emit
from nearflash.boards.open.decode.library import FOLDER
from nearflash.support.native import build_library

PS, CLOCK = "PS2/PS7_X0Y0.PS7", "CLK/BUFGCTRL_X0Y0.BUFGCTRL"


def register(data, **inputs):
    config = {"init": 0, "set": 0, "sync": 1}
    return Cell("FF", config, {"D": data, "CK": CLOCK, "CE": "1", "SR": "0", **inputs})


def design(**cells):
    """A counter of reads: an answer follows each request by a cycle, with the count and the address of two before."""
    asked = f"{PS}:MAXIGP0ARVALID"
    made = {
        CLOCK: Cell("BUFGCTRL", {}, {"I0": f"{PS}:FCLKCLK0"}),
        "taken": make_lut(0b0100, ["valid", asked]),  # asked, and no answer yet
        "valid": register("taken"),
        "low": register("flip", CE="taken"), "flip": make_lut(0b01, ["low"]),
        "high": register("carry", CE="taken"), "carry": Cell("SUM", {}, {"S": "high", "CI": "low"}),
        "shift": Cell("SRL", {"init": 0b01, "bits": 2},
                      {"R0": "0", "R1": "1", "D": f"{PS}:MAXIGP0ARADDR2", "WE": "taken", "CK": CLOCK}),
        "late": register("0", SR=f"{PS}:FCLKRESETN0") ,
        PS: Cell("PS7", {}, {
            "MAXIGP0ARREADY": "taken", "MAXIGP0RVALID": "valid", "MAXIGP0RLAST": "1",
            "MAXIGP0RDATA0": "low", "MAXIGP0RDATA1": "high", "MAXIGP0RDATA2": "shift", "MAXIGP0RDATA3": "late",
            "MAXIGP0RDATA4": "?open", **{f"MAXIGP0RID{bit}": f"{PS}:MAXIGP0ARID{bit}" for bit in range(12)},
        }),
    }  # fmt: skip
    made["late"] = replace(made["late"], config={"init": 0, "set": 1, "sync": 0})
    return made | cells


def test_a_design_answers_its_registers():
    flags = ("-std=c++17", "-O1", "-fPIC")
    made = ctypes.CDLL(str(build_library("emit", emit(design()), "a test", flags, folders=(FOLDER,))))
    made.nf_reset.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64,
                              ctypes.c_uint32]  # fmt: skip
    made.nf_read.restype = ctypes.c_int64
    memory = ctypes.create_string_buffer(4096)
    for level in (0, 1):
        made.nf_reset(ctypes.addressof(memory), 0, 4096, level, 0, 1)
        # bits: count (2), the address of two reads before (first what it began with), the set, what an open pin reads
        seen = [made.nf_read(address) for address in (4, 4, 0, 4, 0)]
        counts, addresses = [1, 2, 3, 0, 1], [0, 1, 1, 1, 0]
        assert seen == [count | shifted << 2 | 1 << 3 | level << 4
                        for count, shifted in zip(counts, addresses, strict=True)]  # fmt: skip
    assert made.nf_write(0, 1) == -1, "which it does not answer"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"flip": make_lut(0b01, ["flop"]), "flop": make_lut(0b01, ["flip"])}, "no loop of logic, not fl.p to fl.p"),
        ({CLOCK: Cell("BUFGCTRL", {}, {"I0": f"{PS}:FCLKCLK1"})}, "FCLK0 over one buffer as its only clock"),
        ({"low": register("flip", CK="high")}, "FCLK0 over one buffer as its only clock"),
    ],
)
def test_what_cannot_be_run_is_an_error(cells, message):
    with pytest.raises(FormatError, match=message):
        emit(design(**cells))
