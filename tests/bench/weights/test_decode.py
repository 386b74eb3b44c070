"""Rows of the decode part: what is counted, and of which formats there are rows."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch

from nearflash.bench.weights import decode, sizes
from nearflash.weights import compress_tensor

RNG = np.random.default_rng(5)


def pruned(dtype=np.float16):
    values = RNG.normal(size=(64, 256)).astype(np.float16)
    return (values * (RNG.random(values.shape) < 0.25)).view(dtype)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Rows of a model of two weights, without the disk's rate."""
    weights = {name: torch.from_numpy(RNG.normal(size=(64, 256)).astype(np.float32)) for name in ("up", "down")}
    model = SimpleNamespace(requires_grad_=lambda on: None, get_parameter=weights.__getitem__)

    def prune(model, tokens, method):
        for weight in weights.values():
            weight[weight.abs() < 0.67] = 0
        yield method

    for name, value in {"load_named": lambda name: (model, None), "layer_weights": lambda model: list(weights),
                        "prune": prune, "disk_rate": lambda path: 2.5, "_REPEATS": 2}.items():  # fmt: skip
        monkeypatch.setattr(decode, name, value)
    return lambda formats, dtypes=("fp16",): list(
        decode.measure("tiny", sizes.SizesSettings(formats, dtypes, (), 1, tmp_path))
    )


@pytest.mark.parametrize(("format", "expected"), [
    ("bitmap", ("bitmap", 16)), ("coded-bitmap", ("coded-bitmap", 16)), ("bitmap-int8", ("bitmap", 8)),
    ("bitmap-int4", ("bitmap", 4)), ("int8", ("groups", 8)), ("int4", ("groups", 4)),
])  # fmt: skip
def test_every_format_has_its_options(format, expected):
    assert format in sizes.FORMATS
    options = sizes.settings_of(format)
    assert (options["format"], options["bits"]) == expected
    assert compress_tensor("x", pruned(), **options).form == (format if format.startswith("int") else "bitmap")


@pytest.mark.parametrize("format", sizes.FORMATS)
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_a_tensor_expands_to_what_its_format_holds(format, dtype):
    values = np.abs(pruned()).view(dtype)
    tensor = decode._pack(values, format)
    tensor.expand(tensor.out)
    assert tensor.lossless == ("int" not in format) and tensor.stored_bytes < tensor.dense.nbytes == values.nbytes
    assert (tensor.out == tensor.dense).all() == tensor.lossless and tensor.out.any()


def test_a_tensor_that_stays_dense_is_copied():
    values = RNG.integers(0, 1 << 16, (64, 64)).astype(np.uint16)
    tensor = decode._pack(values, "coded-bitmap")
    tensor.expand(tensor.out)
    assert tensor.stored_bytes == values.nbytes and tensor.out.tobytes() == values.tobytes()


def test_other_bytes_of_lossless_tensors_are_mismatches():
    right, wrong, lossy = (decode._copy(pruned()) for _ in range(3))
    for each in (wrong, lossy):
        each.expand = lambda to: to.fill(1)
    lossy.lossless = False
    row = decode._rates([right, wrong, lossy, wrong])
    assert row["mismatches"] == 2 and row["bytes_fraction"] == 1 and row["cores"] >= 1


def test_rates_are_of_dense_bytes_and_lie_in_their_range(monkeypatch):
    tensors, seconds = [decode._copy(pruned()), decode._pack(pruned(), "bitmap")], iter([4, 1, 2, 9, 3, 5, 7] * 2)
    monkeypatch.setattr(decode, "time_call", lambda work: (work(), next(seconds))[1])
    row, dense = decode._rates(tensors), 2 * 64 * 256 * 2
    assert row["bytes_fraction"] == (tensors[0].stored_bytes + tensors[1].stored_bytes) / dense
    assert row["decode_gbps_per_core"] == row["decode_gbps_of_all_cores"] == dense / 4 / 1e9
    assert row["decode_gbps_per_core_range"] == [dense / 9 / 1e9, dense / 1 / 1e9]


@pytest.mark.parametrize("peers", [{"zstandard": "zstd-3", "zipnn": "zipnn"}, {"zstandard": "zstd-3"}, {}])
def test_peers_have_rows_where_they_are_installed(measured, monkeypatch, peers):
    for peer in peers:
        pytest.importorskip(peer)
    monkeypatch.setattr(decode, "find_spec", lambda name: object() if name in peers else None)
    rows = measured(("bitmap", "coded", "int4"))
    sources = {source: [row["format"] for row in rows if row["pruning"] == source] for source in ("none", "magnitude")}
    beside = ["copy", *peers.values()]
    assert sources == {"none": [*beside, "coded", "int4"], "magnitude": [*beside, "bitmap", "coded"]}
    assert all((row["bytes_fraction"] == 1) == (row["format"] == "copy") for row in rows)


def test_rows_of_every_dtype_with_positive_rates(measured):
    rows = measured(sizes.FORMATS, ("fp16", "bf16"))
    for row in rows:
        assert row["pruning"] in (("none",) if row["format"].startswith("int") else ("magnitude", "none"))
        low, high = row["decode_gbps_per_core_range"]
        assert 0 < low <= row["decode_gbps_per_core"] <= high and row["decode_gbps_of_all_cores"] > 0
        assert row["mismatches"] == 0 and row["disk_read_gbps"] == 2.5
    assert {(row["format"], row["dtype"]) for row in rows} >= {
        (format, dtype) for format in sizes.FORMATS for dtype in ("fp16", "bf16")
    }


def test_a_loop_that_gives_other_bytes_is_seen_in_its_row(measured, monkeypatch):
    monkeypatch.setattr(decode, "expand_into", lambda data, out: out.fill(1))
    found = {row["format"]: row["mismatches"] for row in measured(("bitmap", "bitmap-int8"))}
    assert (found["copy"], found["bitmap"], found["bitmap-int8"]) == (0, 2, 0)


def test_threads_come_back_to_all_cores_after_an_error():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), decode.bind_to([min(before)]):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
