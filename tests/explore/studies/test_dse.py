"""Design spaces: grids of dies, and builds of our engine."""

import time

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.studies.dse import engine_builds, kvnand_best, kvnand_choice, kvnand_grid, nearflash_row
from nearflash.explore.systems.ifc import EVERY_MECHANISM, QUANTS
from nearflash.explore.systems.nearflash import MeasuredHeads
from nearflash.explore.tables import read_part

FIVE = ("opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b", "mixtral-8x7b")
CONTEXTS = (128, 1_000, 10_000, 100_000)


def test_a_grid_has_every_cell():
    rows = list(kvnand_grid(FIVE, CONTEXTS, list(QUANTS), 16))
    assert len(rows) == 5 * 4 * 3 * 16
    cells = {(row["model"], row["context"], row["quant"], row["arrangement"]) for row in rows}
    assert len(cells) == len(rows)


def test_five_hundred_points_take_less_than_a_second():
    list(kvnand_grid(FIVE[:1], (128,), ("w8a8",), 16))
    start = time.process_time()
    rows = list(kvnand_grid(FIVE, CONTEXTS, ("w16a16", "w4a16"), 16))
    taken = time.process_time() - start
    assert len(rows) == 640
    assert taken * 500 / len(rows) < 1.0


def test_cells_that_do_not_fit_are_empty():
    rows = {row["arrangement"]: row for row in kvnand_grid(["llama3.1-70b"], [100_000], ["w16a16"], 16)}
    assert rows["C-16"]["fits"] and rows["C-16"]["seconds"] > 0
    # 141 GB of weights need eight dies, 33 GB of KV need two.
    assert [name for name, row in rows.items() if row["fits"]] == ["C-16", *(f"D-({n}+{16 - n})" for n in range(8, 15))]
    empty = [row for row in rows.values() if not row["fits"]]
    assert all(row["seconds"] is None and "joules_per_token" not in row for row in empty)


def test_the_best_of_each_cell():
    rows = list(kvnand_grid(FIVE[:2], CONTEXTS, ("w8a8",), 8))
    best = kvnand_best(rows)
    assert len(best) == 2 * 4
    for (model, quant, context), found in best.items():
        mine = [row for row in rows if (row["model"], row["quant"], row["context"]) == (model, quant, context)]
        assert found["seconds"] == min(row["seconds"] for row in mine if row["fits"])


def test_a_cell_in_which_nothing_fits_has_no_best():
    assert kvnand_best(list(kvnand_grid(["llama3.1-70b"], [100], ["w16a16"], 4))) == {}


def test_baselines_stand_beside_every_row():
    """LLaMA2-7B at 100K: 52 GB of K and V are more than Base-1's DRAM, not than Base-2's flash."""
    short, long = (
        {row["arrangement"]: row for row in kvnand_grid(["llama2-7b"], [context], ["w16a16"], 16)}["C-16"]
        for context in (1_000, 100_000)
    )
    assert short["base_1_speed_up"] == pytest.approx(short["base_1_seconds"] / short["seconds"])
    assert long["base_1_seconds"] is None and long["base_1_speed_up"] is None
    assert long["base_2_speed_up"] > short["base_2_speed_up"] > 1
    assert short["first_token_seconds"] > short["seconds"]
    assert short["base_1_usd"] == pytest.approx(8 * 132.75 * 2**30 / 8 / 1e9 * 0.72 + 16 * 4.0)


def test_ours_beside_kvnand():
    """A GPU of 48 GB holds LLaMA3.1-8B in 16 bits, not 70B; the token costs far more than on an edge device."""
    ours = nearflash_row("llama3.1-8b", 10_000)
    flash = {row["arrangement"]: row for row in kvnand_grid(["llama3.1-8b"], [10_000], ["w16a16"], 16)}["C-16"]
    assert ours["fits"] and ours["tokens_per_second"] * ours["seconds"] == pytest.approx(1.0)
    assert ours["usd_per_million"] > 10 * flash["usd_per_million"]
    assert nearflash_row("llama3.1-70b", 10_000)["seconds"] is None


def test_qkv_are_head_parallel_in_compact_ones_alone():
    rows = {row["arrangement"]: row for row in kvnand_grid(["llama2-7b"], [1_000], ["w16a16"], 16)}
    assert {name for name, row in rows.items() if row["parallel"] == "head"} == {"C-16"}
    (free,) = kvnand_best(
        list(kvnand_grid(["llama2-7b"], [1_000], ["w16a16"], 16, EVERY_MECHANISM.without("confined")))
    ).values()
    assert free["parallel"] == "tensor" and free["phases"]["KV gather"] > 0


def test_the_choice_by_context():
    rows = list(kvnand_choice("llama3.1-70b", "w4a16", 8))
    assert [row["arrangement"] for row in rows] == ["C-8", "D-(4+4)"]
    assert rows[1]["from_tokens"] == pytest.approx(89_600, rel=0.08)
    assert list(kvnand_choice("llama2-7b", "w16a16", 2))[-1]["arrangement"] == "none fits"
    with pytest.raises(PlanError, match=r"2 dies must hold llama3\.1-70b in w16a16; they do not"):
        list(kvnand_choice("llama3.1-70b", "w16a16", 2))


def test_a_grid_without_a_mechanism():
    given = (["llama3.1-70b"], [100_000], ["w4a16"], 8)
    (full,), (free,) = (
        kvnand_best(list(kvnand_grid(*given, has))).values()
        for has in (EVERY_MECHANISM, EVERY_MECHANISM.without("confined"))
    )
    assert full["arrangement"] == "D-(4+4)" and free["arrangement"] == "C-8"


def test_energy_price_and_wear_of_a_cell():
    rows = {row["arrangement"]: row for row in kvnand_grid(["llama2-7b"], [10_000], ["w16a16"], 16)}
    found = rows["C-16"]
    assert found["flash_usd"] == pytest.approx(16 * 17.82 * 0.72, rel=0.001)
    assert 0.1 < found["joules_per_token"] < 10
    assert found["years_to_wear"] > 5
    assert found["tokens_per_second"] == pytest.approx(1 / found["seconds"])


@pytest.fixture(scope="module")
def builds():
    return engine_builds()


def test_builds_are_many_and_sorted(builds):
    assert len(builds) == 4 * 4 * 5 * 4 * 2 * 3
    fitting = [row for row in builds if row["fits"]]
    assert fitting == builds[: len(fitting)], "those that fit come first"
    rates = [row["heads_per_second"] for row in fitting]
    assert rates == sorted(rates, reverse=True)


def test_the_build_of_the_synthesis_is_among_them(builds):
    found = next(row for row in builds if (row["channels"], row["heads_per_beat"], row["contexts"]) == (8, 4, 32))
    assert (found["lut"], found["dsp"], found["bram36"]) == (149_901, 180, 535)
    assert found["fits"]


def test_builds_that_do_not_fit(builds):
    assert not any(row["fits"] for row in builds if row["channels"] == 16), "16 channels take 230,400 LUT alone"
    larger = engine_builds("ku15p")
    assert any(row["fits"] for row in larger if row["channels"] == 16)
    assert sum(row["fits"] for row in larger) > sum(row["fits"] for row in builds)


@pytest.mark.parametrize(
    ("part", "drive", "within"),
    [("slc-1400", "slc-low-latency", 0.05), ("page16k-1400", "instinfer-16k", 0.15)],
)
def test_the_closed_form_beside_the_simulated_engine(builds, part, drive, within):
    """At 4,096 tokens; index pages of 16 KB are read by codeword, which the form does not count."""
    measured = read_part(MeasuredHeads, part)
    expected = measured.clock_hz / measured.cycles(4096)
    found = next(
        row for row in builds
        if (row["drive"], row["mode"], row["channels"], row["heads_per_beat"], row["contexts"], row["clock_hz"])
        == (drive, "sparf-page", 8, 4, 32, 285e6)
    )  # fmt: skip
    assert found["heads_per_second"] == pytest.approx(expected, rel=within)


def rate(rows, **given):
    return max(row["heads_per_second"] for row in rows if given.items() <= row.items())


def test_more_of_anything_is_never_slower(builds):
    axes = {"channels": (2, 4, 8, 16), "contexts": (4, 8, 16, 32, 64), "heads_per_beat": (1, 2, 4, 8),
            "clock_hz": (200e6, 250e6, 285e6, 300e6)}  # fmt: skip
    for axis, values in axes.items():
        rates = [rate(builds, mode="sparf-page", **{axis: value}) for value in values]
        assert rates == sorted(rates), axis


def test_reading_less_is_faster(builds):
    rates = [rate(builds, mode=mode, channels=8) for mode in ("dense", "sparf-8", "sparf-page")]
    assert rates == sorted(rates)


@pytest.mark.parametrize("given", [{"tokens": 0}, {"dim": 0}, {"group": -1}])
def test_heads_that_cannot_be(given):
    with pytest.raises(PlanError, match="tokens, dim and group must be 1 at least"):
        engine_builds(**given)


def test_unknown_boards_and_drives():
    with pytest.raises(PlanError, match=r"board must be one of ku15p, ku3p, xc7z010, xc7z020, zu17eg, .*, not 'vu9p'"):
        engine_builds("vu9p")
    with pytest.raises(PlanError, match="ssd must be one of"):
        engine_builds(drives=["floppy"])
