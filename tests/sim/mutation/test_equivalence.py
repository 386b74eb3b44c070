import re

from nearflash.sim.mutation.equivalence import is_equivalent
from nearflash.sim.mutation.mutants import make_mutants


def test_a_redundant_term_may_change_and_a_sum_may_not(sum_component, tmp_path):
    made = make_mutants(sum_component(), 200, 1, tmp_path)
    cells = {kind: cell for kind, cell in re.findall(r"cell (\S+) (\S+)\n", made.original)}
    stuck = f"mutate -module top -port Y -portbit 3 -mode const0 -cell {cells['$or']}"
    no_term = f"mutate -module top -port B -portbit 3 -mode const0 -cell {cells['$or']}"
    assert is_equivalent(made.original, no_term, tmp_path)
    assert not is_equivalent(made.original, stuck, tmp_path)
