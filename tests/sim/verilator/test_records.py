import numpy as np
import pytest
from amaranth.lib import data

from nearflash.sim.verilator.ports import integers_from_words
from nearflash.sim.verilator.records import pack, unpack

LAYOUT = data.StructLayout({"a": 3, "wide": 64, "b": 20})


def test_round_trip_and_amaranths_own_bits():
    rng = np.random.default_rng(2)
    columns = {
        "a": rng.integers(0, 8, 9),
        "wide": rng.integers(0, 2**64, 9, np.uint64),
        "b": rng.integers(0, 1 << 20, 9),
    }
    rows = pack(LAYOUT, columns)
    for name, column in unpack(LAYOUT, rows).items():
        assert column.tolist() == columns[name].tolist()
    for at, value in enumerate(integers_from_words(rows)):
        same = LAYOUT.const({name: int(column[at]) for name, column in columns.items()})
        assert value == same.as_value().value


def test_fields_that_are_not_named_are_zero_and_single_values_are_held():
    assert unpack(LAYOUT, pack(LAYOUT, {"a": 5, "b": [1, 2]}))["a"].tolist() == [5, 5]
    assert not unpack(LAYOUT, pack(LAYOUT, {"a": 5}))["wide"].any()


def test_wrong_fields_are_refused():
    with pytest.raises(ValueError, match=r"^field must be one of a, wide, b, not 'c'$"):
        pack(LAYOUT, {"c": 0})
    with pytest.raises(ValueError, match=r"^a must fit 3 bits, not 8$"):
        pack(LAYOUT, {"a": 8})
