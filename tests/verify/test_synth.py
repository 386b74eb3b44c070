"""Resource counts and logic depth on designs whose cells are known."""

import gc

import pytest
from amaranth import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import config
from nearflash.verify import synth
from nearflash.verify.synth import UnitResources, resources, run


class Stage(wiring.Component):
    """Four parities of six registered bits: one LUT6 each."""

    i: In(24)
    o: Out(4)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        held = Signal(24, reset_less=True)
        m.d.sync += held.eq(self.i)
        m.d.sync += [self.o[k].eq(held[6 * k : 6 * k + 6].xor()) for k in range(4)]
        return m


class Pair(wiring.Component):
    """Two equal stages on the same input, and a register behind them."""

    i: In(48)
    o: Out(4)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.stage_0, m.submodules.stage_1 = stages = (Stage(), Stage())
        m.d.comb += [stage.i.eq(self.i[24 * k : 24 * k + 24]) for k, stage in enumerate(stages)]
        m.d.sync += self.o.eq(stages[0].o ^ stages[1].o)
        return m


@pytest.fixture(scope="module")
def stage() -> UnitResources:
    return resources(Stage(), "xcup")


def test_cells_and_depth_of_a_known_design(stage: UnitResources) -> None:
    assert (stage.lut, stage.ff, stage.dsp, stage.bram36) == (4, 24 + 4, 0, 0)
    assert (stage.logic_depth, stage.path) == (1.0, ("from FDRE held", "LUT6", "to FDRE o"))


@pytest.mark.full
def test_a_multiplier_is_a_dsp_block() -> None:
    class Multiplier(wiring.Component):
        a: In(16)
        b: In(16)
        product: Out(32)

        def elaborate(self, platform: object) -> Module:
            m = Module()
            m.d.sync += self.product.eq(self.a * self.b)
            return m

    assert resources(Multiplier(), "xc7").dsp == 1


@pytest.mark.full
def test_the_enable_of_an_operand_that_a_dsp_block_registers_is_no_path_through_it() -> None:
    class Held(wiring.Component):
        a: In(16)
        b: In(16)
        enables: In(24)
        o: Out(1)

        def elaborate(self, platform: object) -> Module:
            """The product and a comparison behind it take less than the parities of the enable and the product."""
            m = Module()
            a, b, enables = (Signal.like(port, reset_less=True) for port in (self.a, self.b, self.enables))
            m.d.sync += enables.eq(self.enables)
            with m.If(enables.xor()):
                m.d.sync += [a.eq(self.a), b.eq(self.b)]
            m.d.sync += self.o.eq((a * b)[-6:].any())
            return m

    found = resources(Held(), "xc7")
    assert (found.dsp, found.logic_depth) == (1, 5.0)
    assert found.path[0].startswith("DSP48E1")


@pytest.mark.parametrize(
    ("family", "primitive"),
    [pytest.param(*values, marks=pytest.mark.full) for values in (("xc7", "RAM32M"), ("xcup", "RAM32M16"))],
)
def test_the_write_address_of_a_lut_ram_is_no_path_to_what_it_reads(family: str, primitive: str) -> None:
    class Table(wiring.Component):
        address: In(4)
        keys: In(24)
        word: In(4)
        o: Out(1)

        def elaborate(self, platform: object) -> Module:
            """The write address takes two LUT levels; a read and what is made of it take three."""
            m = Module()
            keys, word, address = (Signal.like(port, reset_less=True) for port in (self.keys, self.word, self.address))
            m.submodules.words = words = Memory(shape=4, depth=16, init=[])
            write, read = words.write_port(), words.read_port(domain="comb")
            m.d.sync += [keys.eq(self.keys), word.eq(self.word), address.eq(self.address)]
            m.d.sync += self.o.eq((read.data == word) ^ address.any())
            m.d.comb += [write.addr.eq(Cat(keys[0:8].xor(), keys[8:16].xor(), keys[16:24].xor(), keys[3:11].xor())),
                         write.data.eq(word), write.en.eq(1), read.addr.eq(address)]  # fmt: skip
            return m

    found = resources(Table(), family)
    assert found.logic_depth == 3.0
    assert found.path[1].split()[0] == primitive, "from a register of the read address"


@pytest.mark.full
def test_black_boxes_and_their_cells_add_up_to_the_whole(stage: UnitResources) -> None:
    whole, rest = resources(Pair(), "xcup"), resources(Pair(), "xcup", box=Stage)
    assert (rest.lut, rest.ff) == (4, 4)
    assert rest.lut + 2 * stage.lut == whole.lut
    assert rest.ff + 2 * stage.ff == whole.ff


class Box(wiring.Component):
    """Made with a part of its own; the elaboration of either is an error."""

    i: In(24)
    o: Out(4)

    def __init__(self) -> None:
        super().__init__()
        self.part = Stage()

    def elaborate(self, platform: object) -> Module:
        raise AssertionError("a box must not be elaborated")


def test_a_box_has_its_ports_alone_and_no_warning_of_its_parts(recwarn: pytest.WarningsRecorder) -> None:
    class Around(wiring.Component):
        i: In(24)
        o: Out(4)

        def elaborate(self, platform: object) -> Module:
            m = Module()
            m.submodules.box = box = Box()
            m.d.comb += [box.i.eq(self.i), self.o.eq(box.o)]
            return m

    text = synth._convert(Around(), Box)
    assert text.endswith("module \\Box\nwire width 24 input 0 \\i\nwire width 4 output 1 \\o\nend\n")
    gc.collect()
    assert not [warning for warning in recwarn if "Stage" in str(warning.message)]


def test_a_build_with_levels_counts_the_parser_that_it_has() -> None:
    """The parser is counted apart: that of a build without levels is smaller."""
    for name, has_levels in (("expand-tiny", False), ("expand-tiny-levels", True)):
        units = synth._units(config(name)).units
        assert units["matrix_parser"]().levels is has_levels and ("level_values_4" in units) is has_levels


def test_unknown_names_list_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"family must be one of xc7, xcup, not 'ice40'"):
        list(run("update", "ice40", "tiny"))
    with pytest.raises(ConfigError, match=r"configuration must be one of .*update-tiny-split, .*not 'update-huge'"):
        list(run("update", "xc7", "huge"))
    with pytest.raises(ConfigError, match=r"configuration must be one of .*update-tiny-split, .*not 'expand-huge'"):
        list(run("expand", "xc7", "huge"))
    with pytest.raises(ConfigError, match=r"family must be one of xc7, xcup, not 'ice40'"):
        list(run("expand", "ice40", "tiny"))
