"""The quotient and the length equal their definition; the time is as stated."""

import pytest

from nearflash.gateware.attention.select.reciprocal import RECIPROCAL_BITS, Reciprocal


@pytest.mark.parametrize("total", [1, 2, 3, 1 << 24, (1 << 24) + 1, 0x123456789, (1 << 49) - 1, 1 << 49, (1 << 50) - 1])
def test_equals_the_definition(clocked, total):
    bits = total.bit_length()
    rows = [{"total": total, "start": 1}] + [{"start": 0}] * 80
    seen = clocked(Reciprocal(50), rows, ["done", "o", "length"])
    (done,) = [cycle for cycle, (end, _, _) in enumerate(seen) if end]
    assert seen[done][1:] == [((1 << RECIPROCAL_BITS - 1 + bits) - 1) // total, bits]
    assert done == bits + RECIPROCAL_BITS
