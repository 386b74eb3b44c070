"""Rows of the weights bench, on a small model."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate")

from nearflash.abi.errors import CommandError
from nearflash.bench.weights import decode, forward, loading, sizes
from nearflash.bench.weights.weights import run

DOCLM = str(Path(__file__).parents[2] / "data" / "doclm-7m")
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "ffn_dim": 256, "num_attention_heads": 2, "vocab_size": 128,
         "word_embed_proj_dim": 128, "max_position_embeddings": 64}  # fmt: skip


def rows_of(part, **options):
    return list(run([part], models=[DOCLM], **options))


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(
        CommandError, match="parts must be of bytes, sizes, decode, errors, gpu, loading, forward, not none"
    ):
        list(run(["none"]))
    with pytest.raises(CommandError, match="path must be a folder on the disk to measure, not "):
        list(run(path=tmp_path / "none"))
    with pytest.raises(CommandError, match="windows must be at least 1, not 0"):
        list(run(windows=0))


def test_a_model_that_is_not_there_is_skipped_visibly():
    (row,) = run(["sizes"], models=["none"])
    assert row["model"] == "none" and "folder with a config.json, not 'none'" in row["skipped"]


@pytest.fixture
def short_windows(monkeypatch):
    monkeypatch.setattr(sizes, "_TOKENS", 64)
    monkeypatch.setattr(sizes, "_HELD_OUT_WINDOWS", 2)


@pytest.mark.full
def test_bytes_bounds_and_losses_of_every_pruning(tmp_path, short_windows):
    rows = rows_of("sizes", windows=2, format="coded-bitmap", dtype="fp16", path=tmp_path)
    assert [row["pruning"] for row in rows] == ["magnitude", "wanda", "sparsegpt", "wanda-2:4"]
    for row in rows:
        assert row["lossless"] == 1 and row["density"] == pytest.approx(0.5, abs=0.01)
        assert row["entropy_bound_fraction"] < row["bytes_fraction"] < 0.53
        assert math.isfinite(row["perplexity_of_fp16"]) and sum(row["forms"].values()) == row["forms"]["bitmap"]
    assert not list(tmp_path.iterdir())


def test_codes_alone_are_of_weights_that_are_not_pruned(tmp_path, short_windows):
    (row,) = rows_of("sizes", windows=1, format="int4", dtype="fp16", path=tmp_path)
    assert (row["pruning"], row["lossless"]) == ("none", 0) and row["density"] == pytest.approx(1, abs=1e-4)
    assert row["bytes_fraction"] == pytest.approx(0.28125) and row["perplexity"] > row["perplexity_of_fp16"]
    assert row["perplexity_of_fp16_kv_int4"] > row["perplexity_of_fp16"]
    assert row["perplexity_kv_int4"] > row["perplexity"]


def test_keys_and_values_in_int4_are_as_generation_stores_them():
    cache, states = sizes.RoundedCache(), torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(1))
    states[0, 0, 0] = 0.5  # a constant group
    for first, last in ((0, 3), (3, 5)):
        keys, values = cache.update(states[:, :, first:last], -states[:, :, first:last], 0)
    steps = (states.amax(-1) - states.amin(-1)) / 15
    assert keys.shape == states.shape and torch.equal(keys[0, 0, 0], states[0, 0, 0])
    assert ((keys - states).abs().amax(-1) <= 0.51 * steps + 0.002).all()
    assert ((values + states).abs().amax(-1) <= 0.51 * steps + 0.002).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bound_of_known_distributions(dtype):
    significand = 10 if dtype == torch.float16 else 7
    weight = torch.tensor([[0.0, 1.5, 1.0, 0.0]], dtype=dtype)  # one exponent, half of them zero
    assert sizes.entropy_bound(weight) == pytest.approx(4 + 2 * (1 + significand))
    weight = torch.tensor([[1.0, 2.0, 4.0, -8.0]], dtype=dtype)  # four exponents, none zero
    assert sizes.entropy_bound(weight) == pytest.approx(4 * (1 + significand + 2))


def test_no_lossless_format_is_below_the_bound():
    from nearflash.weights import compress_tensor

    values = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float16)
    values[np.abs(values) < 0.67] = 0
    packed = compress_tensor("weight", values)
    assert 8 * len(packed.data) > sizes.entropy_bound(torch.from_numpy(values))


def test_speeds_of_decoding_beside_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 1 << 20)
    rows = rows_of("decode", dtype="bf16", path=tmp_path)
    assert {"copy", "bitmap", "coded-bitmap", "int4"} <= {row["format"] for row in rows}
    for row in rows:
        assert row["mismatches"] == 0 and row["decode_gbps_per_core"] > 0 and row["disk_read_gbps"] > 0
        assert row["bytes_fraction"] <= 1


def test_threads_of_the_process_come_back_to_all_cores():
    import os

    before = os.sched_getaffinity(0)
    with decode.bind_to([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with forward.large_model(tmp_path_factory.mktemp("opt"), SHAPE) as found:
        yield found


def test_the_large_models_folders_hold_one_model(folders):
    from nearflash.weights import expand, open_checkpoint

    dense = open_checkpoint(folders.formats["dense"])
    for format in ("bitmap", "coded-bitmap"):
        packed = open_checkpoint(folders.formats[format])
        assert all((expand(dense[name]) == expand(packed[name])).all() for name in folders.names)
        assert all(packed[name].form == "bitmap" for name in folders.names)
    coded, unpruned = (open_checkpoint(folders.formats[name]) for name in ("coded", forward.UNPRUNED))
    for name in folders.names:
        pruned, every = expand(dense[name]), expand(unpruned[name])
        assert (expand(coded[name]) == pruned).all() and (every[pruned != 0] == pruned[pruned != 0]).all()
        assert np.count_nonzero(every) > 1.5 * np.count_nonzero(pruned)


def test_loading_compares_times_with_bytes(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 1 << 20)
    rows = {row["format"]: row for row in loading.measure(folders, tmp_path)}
    assert rows["dense"]["bytes_fraction"] == 1 and rows["dense"]["speedup_over_bytes_ratio"] == 1
    for row in rows.values():
        ratio = row["speedup_over_dense"] / row["bytes_ratio"]
        assert row["speedup_over_bytes_ratio"] == pytest.approx(ratio)


@pytest.mark.full
def test_passes_under_a_cap_give_the_same_logits(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 1 << 20)
    rows = {row["case"]: row for row in forward.measure(folders, tmp_path)}
    assert rows.keys() == {"accelerate", "bitmap", "coded-bitmap"}
    for row in rows.values():
        assert row["mismatches"] == 0 and row["peak_bytes"] < row["limit_bytes"], row


def test_a_process_over_its_cap_is_named(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 1 << 20)
    rows = list(forward.measure(folders, tmp_path, 16 << 20))
    assert all("did not end: " in row["skipped"] for row in rows)


def test_bytes_are_beside_their_bound_and_peers():
    rows = rows_of("bytes", dtype="bf16", format="coded")
    ours = {(row["pruning"], row["format"], row["dtype"]): row for row in rows}
    assert 0.6 < ours["none", "coded", "bf16"]["bytes_fraction"] < 0.68
    assert ours["magnitude", "coded", "bf16"]["bytes_fraction"] < 0.37
    assert ours["none", "coded", "fp8-e4m3"]["bytes_fraction"] < 0.83
    for row in rows:
        assert row["of"] and (not row.get("lossless") or row["entropy_bound_fraction"] < row["bytes_fraction"] < 1)


def test_peers_and_fp8_are_beside_their_entropy():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * 0.02
    for row in sizes._fp8_rows([weight]):
        assert row["entropy_bound_fraction"] < row["bytes_fraction"] < row["entropy_bound_fraction"] + 0.05
    for row in sizes._peer_rows({"weight": weight.bfloat16()}, "bf16"):
        assert 0.6 < row["bytes_fraction"] < 1
