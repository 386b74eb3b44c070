"""The whole design: one processor system with every port on its pins, one clock, and a text that does not vary."""

import hashlib
import re
import subprocess
import sys

import pytest
from amaranth.back import rtlil

from nearflash.abi.kernel.config import ExpandConfig, config
from nearflash.boards.zynq7.ps7 import Ps7
from nearflash.boards.zynq7.top import ZynqTop

#: A kernel that converts in a second; no board has it.
SMALL = ExpandConfig("small", width=4, port_bits=64, columns_max=512, outstanding_bursts=2, burst_bytes=128,
                     clock_hz=1, formats=("plain16",))  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return rtlil.convert(ZynqTop(SMALL, 0x89AB_CDEF), name="top", emit_src=False)


def pins(text, cell):
    """Connections of the one cell of a type, by pin."""
    body = re.search(rf"^  cell \\{cell} .*?\n(.*?)^  end", text, re.MULTILINE | re.DOTALL)[1]
    return dict(re.findall(r"^    connect \\(\w+) (.*)$", body, re.MULTILINE))


def test_the_processor_system_has_its_ports(text):
    found = pins(text, "PS7")
    for port in ("MAXIGP0", "SAXIHP0", "SAXIHP1"):
        assert {name for name in found if name.startswith(port)} >= {
            f"{port}{pin}"
            for pin in ("ACLK", "AWADDR", "AWVALID", "AWREADY", "WID", "WLAST", "BVALID", "ARLEN", "RDATA")
        }
    assert not [name for name in found if name.startswith(("SAXIHP2", "MAXIGP1", "SAXIACP"))]
    assert {"FCLKCLK", "FCLKRESETN", "IRQF2P"} <= found.keys()
    clocks = {value for name, value in found.items() if name.endswith("ACLK")}
    assert len(clocks) == 1, "all ports run at one clock"


def test_pins_have_the_processor_systems_widths(text):
    widths = dict.fromkeys(("SAXIHP0AWSIZE", "MAXIGP0ARSIZE"), 2) | {"SAXIHP0WDATA": 64, "MAXIGP0ARID": 12,
                                                                    "SAXIHP1ARID": 6, "SAXIHP0ARQOS": 4}  # fmt: skip
    module = re.search(r"^module \\top\.ps\n.*?^end", text, re.MULTILINE | re.DOTALL)[0]
    declared = {name: int(width) for width, name in re.findall(r"wire width (\d+) +(?:\w+ \d+ +)?\\(\S+)", module)}
    for pin, width in widths.items():
        value = pins(text, "PS7")[pin]
        constant = re.match(r"(\d+)'", value)
        slices = re.match(r"\\(\S+) \[(\d+):(\d+)\]", value)
        if constant:
            assert int(constant[1]) == width
        elif slices:
            assert int(slices[2]) - int(slices[3]) + 1 == width
        else:
            assert declared[value.removeprefix("\\")] == width, pin


def test_one_light_is_all_that_leaves_the_part(text):
    top = re.search(r"^module \\top\n.*?^end", text, re.MULTILINE | re.DOTALL)[0]
    assert re.findall(r"wire width (\d+) (input|output|inout) \d+ +\\(\w+)", top) == [("1", "output", "led")]


def test_clock_and_reset_come_over_global_buffers(text):
    assert len(re.findall(r"^  cell \\BUFG ", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^  cell \\PS7 ", text, re.MULTILINE)) == 1


def test_the_git_revision_is_in_the_design(text):
    assert f"connect \\git_revision 32'{0x89AB_CDEF:032b}" in text


def test_another_process_gives_the_same_text(text):
    """The digest in a manifest is of this text: neither hashes nor addresses may be in it."""
    script = f"""import hashlib
from amaranth.back import rtlil
from nearflash.abi.kernel.config import ExpandConfig
from nearflash.boards.zynq7.top import ZynqTop
text = rtlil.convert(ZynqTop({SMALL!r}, 0x89AB_CDEF), name="top", emit_src=False)
print(hashlib.sha256(text.encode()).hexdigest())"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_a_processor_system_has_as_many_memory_ports_as_are_used():
    assert [len(Ps7(count).hp) for count in (1, 4)] == [1, 4]
    shared = [["m_axi_gmem0", "m_axi_gmem1"], ["m_axi_gmem2", "m_axi_gmem3"]]
    assert ZynqTop(config("update-pynq-z2")).system.ports == shared
    assert ZynqTop(config("expand-pynq-z2")).system.ports == [["m_axi_gmem0"], ["m_axi_gmem1"]]
