import pytest

pytest.importorskip("torch")

import torch

from nearflash.abi.errors import PlanError, StateError
from nearflash.offload.cache.host_attention import attend_halves
from nearflash.offload.machine import measure, measure_layer
from nearflash.offload.machine.machine_file import available_bytes
from nearflash.offload.machine.shape import measure_shape
from nearflash.offload.machine.stopwatch import seconds_between, seconds_of
from nearflash.planning.profile import machine_toml, parse_machine
from nearflash.planning.shapes import from_config
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import keep_profile
from nearflash.weights.compress import compress_tensor
from nearflash.weights.file import write_file
from nearflash.weights.folder import open_folder


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(measure, "_COPY_BYTES", 1 << 20)


@pytest.mark.full
def test_a_measured_machine_is_a_profile(tmp_path, monkeypatch):
    small = {"_CONTEXT": 64, "_CACHE_BYTES": 8 << 20, "_MANY_TOKENS": 1024, "_MATRICES": 4, "_VOCABULARY": 2048,
             "_BESIDE_BYTES": 4 << 20, "_BESIDE_S": 0.02, "_BESIDE_TIMES": 2}  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(measure, name, value)
    machine = measure.measure_machine(tmp_path, "bfloat16")
    assert "bfloat16" in machine.compute.source and machine.compute.expand_bytes_per_s > 0
    assert parse_machine(machine_toml(machine)) == machine
    assert machine.memory.gpu_bytes + machine.memory.host_bytes <= available_bytes() * 1.2
    assert machine.disk is not None
    assert {rate.direct for rate in machine.rates} == {True, False} and {"read", "write"} == {
        rate.call for rate in machine.rates
    }
    assert machine.compute.matmul_prefill_flops_per_s > 1e9 and machine.schedule.per_layer_s < 0.1
    assert not [each for each in tmp_path.iterdir() if each.name != "state"]


@pytest.mark.parametrize("far", [False, True])
def test_weights_are_expanded_where_the_runtime_does(far):
    """Here a processor is both sides; what is coded in levels is the host's on both."""
    bits = torch.randn(64, 64).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    for form in (("groups", 4), ("bitmap", 8), ("coded", 16)):
        kept = measure._keep(compress_tensor("w", bits, *form))
        assert measure._expand_rate(torch.device("cpu"), [kept], far=far) > 0


def test_an_output_layer_is_read_from_memory(monkeypatch):
    """As many as the caches do not hold, of the model's sizes."""
    monkeypatch.setattr(measure, "_HEADS_BYTES", 8 << 20)
    seen = []
    monkeypatch.setattr(measure, "seconds_of", lambda device, work: seen.extend(work()) or 2.0)
    shape = from_config({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 8192, "ffn_dim": 64,
                         "num_hidden_layers": 1})  # fmt: skip
    assert measure._head_bytes(torch.device("cpu"), torch.bfloat16, shape) == (8 << 20) / 2
    assert {tuple(each.shape) for each in seen} == {(1, 8192)} and len(seen) == 8


def test_more_is_expanded_than_the_caches_hold(tmp_path, monkeypatch):
    """One layer of small tensors alone stays in them from one repeat to the next."""
    bits = torch.randn(64, 64).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    packed = [compress_tensor(f"layers.{number}.w", bits, "coded") for number in range(5)]
    write_file(tmp_path / "model.safetensors", {each.name: (each.dtype, each.shape) for each in packed}, packed)
    monkeypatch.setattr(measure, "_EXPANDED_BYTES", 2 * bits.nbytes + 1)
    assert [each.name for each in measure._find_compressed(tmp_path)] == [f"layers.{number}.w" for number in range(3)]


def test_rates_that_were_kept_are_used_again(tmp_path, monkeypatch):
    rates = [Rate("read", 4 << 20, 1, 2.5, 2.4, 2.6), Rate("read", 4 << 20, 4, 3.0, 2.9, 3.1),
             Rate("read", 1 << 20, 4, 4.0, 3.9, 4.1), Rate("write", 1 << 20, 4, 2.0, 1.9, 2.1),
             Rate("write", 1 << 16, 1, 0.5, 0.4, 0.6), Rate("random", 4096, 1, 0.1, 0.1, 0.1)]  # fmt: skip
    keep_profile(tmp_path, rates, "2026-11-24")
    monkeypatch.setattr(measure, "measure_drive", None)
    found = tuple(measure._disk_rates(tmp_path))
    disk = measure._disk(found, 1e-4)
    # Reads as large ones, however fast small ones are: their memory stays in a processor's cache, a layer's does not.
    assert (disk.read_weights_bytes_per_s, disk.write_back_bytes_per_s, disk.write_tokens_bytes_per_s) == (
        3e9,
        2e9,
        5e8,
    )


@pytest.mark.parametrize("by_token", [False, True])
def test_fp16_beside_a_gpu_is_timed_as_the_host_attends(monkeypatch, by_token):
    """By compiled loops, to keys and values as they lie in memory, or in a buffer."""
    seen = []

    def note(threads, query, states, counts):
        seen.append((states.stride()[-2:], counts))
        return attend_halves(threads, query, states, counts)

    monkeypatch.setattr(measure, "_CACHE_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "attend_halves", note)
    rate = measure._attention_bytes(torch.device("cpu"), torch.float16, (4, 2, 64), by_token=by_token, loops=True)
    assert rate > 0 and seen[0] == ((2 * 16 * 2 * 64 if by_token else 64, 1), [512] * 16)


def test_a_folder_that_is_not_there_cannot_be_measured(tmp_path):
    with pytest.raises((StateError, FileNotFoundError)):
        list(measure._disk_rates(tmp_path / "none"))


def test_other_dtypes_are_rejected(tmp_path):
    with pytest.raises(PlanError, match="dtype must be one of float16, bfloat16, float32, not 'int8'"):
        measure.measure_machine(tmp_path, "int8")


def test_seconds_are_the_median_after_warming_up():
    calls = []
    assert 0 <= seconds_of(torch.device("cpu"), lambda: calls.append(1), repeats=3) < 1
    assert len(calls) == 4


def test_both_of_a_pair_are_timed_on_a_machine_that_is_as_fast(monkeypatch):
    """A machine that becomes slower by half between the first and the last pair."""
    now, second = [0.0], [1.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds * second[0]
        second[0] *= 1.01

    difference = seconds_between(torch.device("cpu"), lambda: work(3.0), lambda: work(1.0), least_s=60.0)
    assert difference == pytest.approx(2.0, rel=0.25)
    assert now[0] >= 60


def test_what_is_lost_beside_each_other():
    assert measure._shares(1.0, 1.0) == (0, 0)
    assert measure._shares(0.5, 0.5) == (1, 1)
    assert measure._shares(0.8, 1.0) == (pytest.approx(0.2), 0)
    assert measure._shares(1.1, 0.0) == (0, pytest.approx(1 / 1.1))


@pytest.fixture
def short_layers(monkeypatch):
    """Layers of a few megabytes, timed for a tenth of a second."""
    monkeypatch.setattr(measure_layer, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(measure_layer, "_PREFILL_S", 0.1)
    monkeypatch.setattr(measure_layer, "_STEP_S", 0.02)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_a_layer_of_the_model_is_timed(saved, monkeypatch, short_layers, family):
    monkeypatch.setattr(measure_layer, "STEP_TOKENS", (1, 8))
    monkeypatch.setattr(measure_layer, "_PREFILL", (2, 16))
    folder, _ = saved(family)
    shape = measure_shape(open_folder(folder))
    rates = measure_layer.measure_layer(folder, shape, torch.device("cpu"), torch.float32, 1e12)
    assert rates.flops_per_s > 0 and rates.bytes_per_s > 0
    assert rates.tokens == (1, 8, 32) and len(rates.factors) == 3
    assert rates.factors[0] == pytest.approx(1) or rates.factors[0] < 1  # multiplying may be the longer
    assert rates.factors[-1] == 1


def test_attention_is_taken_off_a_layers_prefill(saved, monkeypatch):
    """The plan has a term of it, by its own rate, which is far below that of matrices; half of the time stays."""
    folder, _ = saved("llama")
    shape = measure_shape(open_folder(folder))
    monkeypatch.setattr(measure_layer, "STEP_TOKENS", (1,))
    monkeypatch.setattr(measure_layer, "_PREFILL", (2, 16))
    monkeypatch.setattr(measure_layer, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(measure_layer, "seconds_between", lambda *_: len(shape.layers) - 1.0)  # a second a layer
    operations = 4 * 2 * 16 * 16 * shape.heads * shape.head_dim
    of_matrices = 2 * shape.largest_layer.active_parameters * 32
    for attention_s, matrices_s in ((1e-9, 1), (0.25, 0.75), (0.9, 0.5)):
        rates = measure_layer.measure_layer(
            folder, shape, torch.device("cpu"), torch.float32, attention_rate=operations / attention_s
        )
        assert rates.flops_per_s == pytest.approx(of_matrices / matrices_s)


def test_a_prompts_attention_counts_every_token_as_the_last(monkeypatch):
    """Heads of queries that share those of keys, and all of them without."""
    monkeypatch.setattr(measure_layer, "_ATTENDED", (2, 8))
    monkeypatch.setattr(measure_layer, "seconds_of", lambda device, work: work().numel())
    for heads in ((4, 2, 16), (3, 3, 8)):
        queries, _, dim = heads
        rate = measure_layer.prefill_attention_rate(heads, torch.device("cpu"), torch.bfloat16)
        assert rate == (4 * 2 * 8 * 8 * queries * dim) / (2 * queries * 8 * dim)


def test_models_that_transformers_does_not_know_are_not_timed(saved, short_layers, tmp_path):
    folder, _ = saved("llama")
    shape = measure_shape(open_folder(folder))
    file = tmp_path / "other.json"
    file.write_text('{"model_type": "of another library", "hidden_size": 64}')
    assert measure_layer.measure_layer(file, shape, torch.device("cpu"), torch.float32, 1e12) is None
    file.write_text((folder / "config.json").read_text())
    assert measure_layer.measure_layer(file, shape, torch.device("cpu"), torch.float32, 1e12) is not None


def test_layers_with_experts_or_beyond_memory_are_not_timed(saved, monkeypatch):
    folder, _ = saved("mixtral")
    shape = measure_shape(open_folder(folder))
    assert measure_layer.measure_layer(folder, shape, torch.device("cpu"), torch.float32, 1e12) is None
    folder, _ = saved("llama")
    monkeypatch.setattr(measure_layer, "available_bytes", lambda: 1000)
    shape = measure_shape(open_folder(folder))
    assert measure_layer.measure_layer(folder, shape, torch.device("cpu"), torch.float32, 1e12) is None
