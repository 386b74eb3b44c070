from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import ConfigError
from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.run import run, run_target
from nearflash.verify.mutants.target import Target
from nearflash.verify.units.catalogue import choose_targets


def test_good_vectors_kill_all_but_the_equivalent(sum_target):
    row, left = run_target("test.sum", sum_target(), 60, 1)
    assert row["mutants"] == 60
    assert row["killed"] + row["equivalent"] == 60
    assert row["equivalent"] > 0, "the term that is always zero has such mutants"
    assert row["kill_fraction"] == 1.0
    assert left == []


@pytest.mark.full
def test_weak_vectors_leave_survivors(sum_target):
    row, left = run_target("test.sum", sum_target(largest=15), 60, 1)
    assert row["kill_fraction"] < 0.9
    assert len(left) == 60 - row["killed"] - row["equivalent"]


def test_the_original_must_equal_the_model(sum_target):
    with pytest.raises(ConfigError, match=r"test\.sum must equal its model before it is mutated"):
        run_target("test.sum", sum_target(wrong=1), 60, 1)


@pytest.mark.full
def test_runs_cut_off_show_what_a_reset_has_to_drop():
    def vectors(rng):
        items = rng.integers(0, 2, 200, dtype=np.uint8)
        return {"i": items}, {"o": items}

    target = Target(lambda: ObservedStreams(SkidBuffer(1)), vectors, part="inner", stalls=("none", "both"))
    left = [run_target("test.skid", replace(target, cut_cycles=cut), 1000, 1)[1] for cut in ((), (*range(4, 30),))]
    assert set(left[0]) > set(left[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("unit", "least"),
    [
        # Five of these hundred do what the original does; the proof, which knows no impossible states, does not see it.
        ("attention.select.select", 0.93),
        ("attention.numerics.mac", 0.95),
        ("weights.bitmap", 0.95),
        ("weights.coded", 0.95),
        ("weights.code_product", 0.95),
        ("gradients.delta", 0.95),
        ("gradients.header", 0.95),
        ("gradients.pairs", 0.95),
        ("weights.popcount", 0.95),
        ("weights.pack", 0.95),
        ("weights.parser", 0.95),
        ("weights.unpack", 0.95),
    ],
)
def test_a_sample_of_the_datapath_units(unit, least):
    (row,) = run(choose_targets([unit]), mutants=100)
    assert row["mutants"] == 100
    assert row["kill_fraction"] >= least
