import re

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.verify.mutants.equivalence import is_equivalent
from nearflash.verify.mutants.mutants import make_mutants


def test_a_redundant_term_may_change_and_a_sum_may_not(sum_component, tmp_path):
    made = make_mutants(sum_component(), 200, 1, tmp_path)
    cells = {kind: cell for kind, cell in re.findall(r"cell (\S+) (\S+)\n", made.original)}
    stuck = f"mutate -module top -port Y -portbit 3 -mode const0 -cell {cells['$or']}"
    no_term = f"mutate -module top -port B -portbit 3 -mode const0 -cell {cells['$or']}"
    assert is_equivalent(made.original, no_term, tmp_path)
    assert not is_equivalent(made.original, stuck, tmp_path)


class Table(wiring.Component):
    """A memory of 256 words, written with `a` and a term that is always zero."""

    LATENCY = 1

    a: In(8)
    b: In(8)
    o: Out(8)

    def elaborate(self, platform):
        m = Module()
        m.submodules.memory = memory = Memory(shape=8, depth=256, init=[])
        write, read = memory.write_port(), memory.read_port()
        redundant = (self.a & self.b) & ~self.a
        m.d.comb += [write.addr.eq(self.b), write.data.eq(self.a | redundant), write.en.eq(self.b[0])]
        m.d.comb += [read.addr.eq(self.a), self.o.eq(read.data)]
        return m


def test_what_is_written_decides_where_there_is_a_memory(tmp_path):
    made = make_mutants(Table(), 300, 1, tmp_path)
    cells = {kind: cell for kind, cell in re.findall(r"cell (\S+) (\S+)\n", made.original)}
    port = f"mutate -module top -portbit 3 -cell {cells['$or']} -mode const0 -port"
    assert is_equivalent(made.original, f"{port} B", tmp_path)
    assert not is_equivalent(made.original, f"{port} A", tmp_path)
    address = f"mutate -module top -port ADDR -portbit 2 -mode inv -cell {cells['$memwr_v2']}"
    assert not is_equivalent(made.original, address, tmp_path)
