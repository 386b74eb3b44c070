"""The sweeps that the papers show: every batch, drive, model, optimizer, split; and what each has to look like."""

from itertools import pairwise

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.shapes import list_trained
from nearflash.explore.studies.dse import kvnand_best, kvnand_grid
from nearflash.explore.studies.sweeps import endor_rows, instinfer_rows, row_of, smart_infinity_rows
from nearflash.explore.systems.ifc import QUANTS
from nearflash.explore.systems.instinfer import Serving, instinfer_step
from nearflash.explore.systems.layered import Placement
from nearflash.explore.systems.smart_infinity import METHODS

BATCHES, DRIVES = (4, 8, 16, 32, 64, 128, 256), range(1, 21)
SYSTEMS = (
    "FlexGen",
    "FlexGen SparQ",
    "InstInfer dense",
    "InstInfer sparf-8",
    "nearflash sparf-page",
    "nearflash sparf-page T=256",
)
FIVE = ("opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b", "mixtral-8x7b")
CONTEXTS = (128, 512, 1_000, 4_000, 10_000, 32_000, 100_000)


@pytest.fixture(scope="module")
def serving():
    found = {}
    for row in instinfer_rows(BATCHES, DRIVES):
        found[row["system"].partition(",")[0], row["batch"], row["drives"]] = row
    return found


def test_every_batch_and_number_of_drives(serving):
    assert set(serving) == {(name, batch, drives) for name in SYSTEMS for batch in BATCHES for drives in DRIVES}


@pytest.mark.parametrize("name", SYSTEMS)
def test_throughput_grows_with_batch_and_drives(serving, name):
    for drives in (1, 5, 20):
        rates = [serving[name, batch, drives]["units_per_second"] for batch in BATCHES]
        assert all(after >= before for before, after in pairwise(rates))
    for batch in (4, 256):
        rates = [serving[name, batch, drives]["units_per_second"] for drives in DRIVES]
        assert all(after >= before * 0.999999 for before, after in pairwise(rates))


@pytest.mark.parametrize("batch", BATCHES)
def test_the_order_of_the_systems(serving, batch):
    rates = [serving[name, batch, 1]["units_per_second"] for name in SYSTEMS[:4]]
    assert rates == sorted(rates), "FlexGen, with SparQ, dense in drives, sparse in drives"


def test_drives_gain_until_the_gpu_is_what_remains(serving):
    dense, sparse = (
        [serving[name, 256, drives]["units_per_second"] for drives in DRIVES]
        for name in ("InstInfer dense", "InstInfer sparf-8")
    )
    assert 5 < sparse[-1] / sparse[0] < dense[-1] / dense[0] < 20
    gpu = serving["InstInfer sparf-8", 256, 20]["phases"]["GPU"]
    assert gpu / serving["InstInfer sparf-8", 256, 20]["seconds"] > 0.3


def test_breakdowns_are_of_the_step(serving):
    for row in serving.values():
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
        assert row["units_per_second"] == pytest.approx(row["batch"] / row["seconds"])


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd-momentum"])
def test_training_of_every_size(optimizer):
    rows = list(smart_infinity_rows([], range(1, 11), optimizer=optimizer))
    assert len(rows) == len(list_trained()) * 10 * len(METHODS)
    for method in METHODS[1:]:
        gains = [row["speed_up"] for row in rows if (row["model"], row["method"]) == ("gpt2-8.4b", method)]
        assert gains[-1] > 1
        if method != "software-only":
            assert gains[-1] > gains[3], "RAID0 stops at four drives, drives that compute go on"


@pytest.mark.parametrize("drives", [1, 4, 10])
def test_fewer_kept_gradients_gain_more(drives):
    gains = []
    for keep in (0.01, 0.02, 0.05, 0.1):
        rows = smart_infinity_rows(["gpt2-8.4b"], [drives], keep=keep)
        gains += [row["speed_up"] for row in rows if row["method"] == "SU+O+C"]
    assert len(gains) == 4
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("gpu", ["a4000", "a5000", "a100"])
def test_gpus(gpu):
    rows = {row["method"]: row for row in smart_infinity_rows(["gpt2-4.0b"], [6], gpu=gpu)}
    assert rows["SU+O+C"]["speed_up"] > rows["SU"]["speed_up"] > 1


@pytest.mark.parametrize("dies", [8, 16])
def test_every_split_of_every_model(dies):
    rows = list(kvnand_grid(FIVE, CONTEXTS, list(QUANTS), dies))
    assert len(rows) == 5 * 7 * 3 * dies
    empty = [row for row in rows if not row["fits"]]
    assert 0 < len(empty) < len(rows) / 2
    best = kvnand_best(rows)
    for model in FIVE:
        for quant in QUANTS:
            times = [best[model, quant, context]["seconds"] for context in CONTEXTS if (model, quant, context) in best]
            assert times == sorted(times)


def test_a_large_model_needs_all_dies():
    rows = list(kvnand_grid(["llama3.1-70b"], [128, 100_000], ["w16a16"], 8))
    assert [row["arrangement"] for row in rows if row["fits"]] == ["C-8"], "141 of 142.6 GB, and a short context"


@pytest.mark.parametrize(
    ("model", "layers"), [("opt-66b", (5, 8, 51)), ("llama2-70b", (6, 10, 64)), ("opt-13b", (0, 0, 40))]
)
def test_compressed_layers(model, layers):
    gains = {row["format"]: row["speed_up"] for row in endor_rows(model, Placement(*layers))}
    assert gains["dense"] == 1
    assert 1.3 < gains["bitmap"] < gains["bitmap, direct"] < gains["coded bitmap (ours), direct"] < 3


@pytest.mark.parametrize("density", [0.1, 0.3, 0.7])
def test_other_densities_have_no_coded_form(density):
    rows = list(endor_rows("opt-66b", Placement(ssd=2), density=density))
    assert [row["format"] for row in rows] == ["dense", "bitmap", "bitmap, direct"]


def test_a_row_of_an_outcome():
    row = row_of(instinfer_step(Serving()), drives=1)
    assert row["drives"] == 1
    assert row["units_per_second"] * row["seconds"] == pytest.approx(64)
    assert set(row) >= {"system", "model", "phases", "hidden", "traffic_bytes", "memory_bytes", "fits"}


def test_sweeps_of_nothing():
    assert list(instinfer_rows([], [1])) == list(instinfer_rows([4], [])) == []
    with pytest.raises(PlanError, match="drives must be 1 at least, not 0"):
        list(instinfer_rows([4], [0]))
