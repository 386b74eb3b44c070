from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.queue import StreamQueue
from nearflash.verify.mutants.mutants import MUTANT, make_mutants


def test_the_same_seed_gives_the_same_mutants(sum_component, tmp_path):
    first, again, other = (make_mutants(sum_component(), 40, seed, tmp_path) for seed in (1, 1, 2))
    assert first.commands == again.commands != other.commands
    assert first.design.digest == again.design.digest != other.design.digest
    assert len(first.commands) == 40


def test_every_mutant_has_its_number_at_the_selecting_input(sum_component, tmp_path):
    made = make_mutants(sum_component(), 40, 1, tmp_path)
    port = made.design.ports[-1]
    assert (port.name, port.width, port.is_input) == (MUTANT, 6, True)
    text = made.design.write_verilog(tmp_path).read_text()
    assert all(f"6'h{number:02x}" in text for number in range(1, 41))
    assert MUTANT not in made.original


def test_clocks_are_left_alone(sum_component, tmp_path):
    made = make_mutants(sum_component(), 200, 1, tmp_path)
    assert made.commands
    assert not [command for command in made.commands if "CLK" in command]


def test_constant_ports_of_a_read_without_clock_are_left_alone(tmp_path):
    """Yosys cannot write a mutant of them as Verilog."""
    made = make_mutants(StreamQueue(4, 4), 10_000, 1, tmp_path)
    assert [command for command in made.commands if "-port ADDR" in command]
    assert not [command for command in made.commands if "ARST" in command]


def test_mutants_may_be_in_one_part_alone(sum_component, tmp_path):
    class Inverted(wiring.Component):
        a: In(8)
        o: Out(9)

        def elaborate(self, platform):
            m = Module()
            m.submodules.inner = inner = sum_component()
            m.d.comb += [inner.a.eq(~self.a), inner.b.eq(self.a + 1), self.o.eq(inner.o - self.a)]
            return m

    everywhere, inside = (make_mutants(Inverted(), 10_000, 1, tmp_path, part=part).commands for part in ("", "inner"))
    assert set(inside) < set(everywhere)
    assert all("inner." in command for command in inside)
