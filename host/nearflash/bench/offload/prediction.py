"""Policies drawn at random, as the cost model predicts them and as they run: seconds a token on this machine.

Each row is one policy: shares of weights, KV cache and activations by tier, as the runtime places them, batches, bits,
a format of the weights, an attention policy, prompts and new tokens, drawn with the `seed` of the row. Nothing is
fitted to a policy: all are predicted from the machine's profile, which is measured in this run, as `nearflash plan`
does. Where other programs compute meanwhile, of this machine or of others on the same processors, it is measured again
before each policy, and the row has that.

error: predicted over measured seconds a token, less one; the prompts' time is in both, loading the model is not, nor a
first pass that touches its memory.

product_gflops_per_s: of one product of matrices, at the profile, before the policy ran, and after. No profile predicts
to 10 % what a machine computes that is not as fast by itself: a policy between whose three rates there is more than
that runs again, `tries` times at most three, and is counted apart if there still is.

    python -m nearflash.bench.offload.prediction PATH CONFIG SEED

prints the rows of `measure` as JSON: `measure_apart` has them from a process with the threads of `nearflash generate`,
which sleep while they wait. Those that torch has by default spin, and take a processor from what is expanded meanwhile.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from nearflash.abi.errors import CommandError
from nearflash.bench.disk import disk_rate, write_back
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.offload import OffloadedModel
from nearflash.offload.cache.engines import engine_read_fraction
from nearflash.offload.machine.measure import measure_machine
from nearflash.offload.machine.plan import crossing_fraction, model_shape
from nearflash.offload.machine.stopwatch import times_per_second
from nearflash.offload.report import OffloadReport
from nearflash.planning.cost import Prediction, predict
from nearflash.planning.memory import peaks
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import Machine
from nearflash.planning.terms import Workload
from nearflash.support.threads import idle_processors, threads_environment
from nearflash.weights.convert import layer_weights, write_model
from nearflash.weights.pretrained import silent_transformers

__all__ = ["RandomPolicy", "main", "measure", "measure_apart", "random_policy"]

FORMATS = {"dense": None, "coded": ("coded", 16), "int4": ("groups", 4)}
"""Of the weights' files, as `nearflash compress` writes them."""
_COMMAND = (sys.executable, "-m", "nearflash.bench.offload.prediction")
_TIERS = ("gpu", "host", "disk")
_BATCH_SIZES, _BATCHES = (1, 2, 4, 8, 16), (1, 2, 4)
_PROMPT_TOKENS, _NEW_TOKENS = (16, 513), (6, 17)
_PREFILL_TOKENS = 8192
"""Of a block at most: its prompts are not all of the time."""
_LEAST_S = 4.0
"""That a policy is measured for, in whole runs."""
_TRIES = 3
"""Of a policy, until the machine is as fast before and after it as in its profile."""
_GOOD, _BAD = 0.1, 0.2
_SIDE, _PRODUCT_S = 1024, 0.5
"""Of the matrices of the product that shows how fast the machine is, and for how long it is repeated."""
_BIT_PROBABILITY = 0.25


@dataclass(frozen=True)
class RandomPolicy:
    """One policy, and what it is for."""

    weights: str
    """One of FORMATS."""
    policy: OffloadPolicy
    workload: Workload
    attention: AttentionPolicy | None


def random_policy(random: np.random.Generator, layers: int, head_dim: int) -> RandomPolicy:
    """A policy for a model of so many layers, of what runs on a machine without a GPU."""
    while True:
        size, count = int(random.choice(_BATCH_SIZES)), int(random.choice(_BATCHES))
        low, high = np.log(_PROMPT_TOKENS)
        prompt, new = int(np.exp(random.uniform(low, high))), int(random.integers(*_NEW_TOKENS))
        if size * count * prompt <= _PREFILL_TOKENS:
            break
    weights, cache = _shares(random, layers), _shares(random, layers * count)
    form = str(random.choice(list(FORMATS)))
    cache_bits = 4 if random.random() < _BIT_PROBABILITY else 16
    in_memory = form == "dense" and not weights.disk  # a dense file's layers can be quantised once they are loaded
    attention = None
    if cache_bits == 16 and random.random() < _BIT_PROBABILITY:
        attention = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=head_dim // 4, top_k=1 / 8, local_window=16)
    policy = OffloadPolicy(
        size, count, weights, cache, _shares(random, count), overlap=bool(random.random() >= _BIT_PROBABILITY),
        cpu_attention=bool(random.integers(2)), cache_bits=cache_bits,
        weight_bits=4 if in_memory and random.random() < _BIT_PROBABILITY else 16,
    )  # fmt: skip
    return RandomPolicy(form, policy, Workload(prompt, new), attention)


def _shares(random: np.random.Generator, units: int) -> Shares:
    """All on one tier, on two or on three: so many units, which is what the runtime places."""
    tiers = random.permutation(_TIERS)[: random.integers(1, len(_TIERS) + 1)]
    counts = random.multinomial(units, random.dirichlet(np.ones(len(tiers))))
    return Shares(**{str(tier): count / units for tier, count in zip(tiers, counts, strict=True)})


class _Folders:
    """A model's folders by format, below `path`: random weights in bf16 of a configuration's sizes, made once each."""

    def __init__(self, config: PreTrainedConfig, path: Path) -> None:
        self.config, self._path = config, path

    @cached_property
    def _model(self) -> Any:
        torch.manual_seed(0)
        with silent_transformers():
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).eval()

    def __getitem__(self, form: str) -> Path:
        folder = self._path / form
        if not folder.exists():
            names = layer_weights(self._model) if FORMATS[form] else ()
            kind, bits = FORMATS[form] or ("bitmap", 16)
            write_model(self._model, folder, format=kind, bits=bits, dtype=torch.bfloat16, compressed=names)
            self.config.dtype = torch.bfloat16
            self.config.save_pretrained(folder)
            write_back(folder.iterdir())  # later it would take the drive and a processor from what is measured
        return folder


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; an empty SEED is a random one."""
    path, config, seed = sys.argv[1:] if argv is None else argv
    sizes = AutoConfig.from_pretrained(config, local_files_only=True)
    for row in measure(Path(path), sizes, int(seed) if seed else None):
        print(json.dumps(row), flush=True)


def measure_apart(path: Path, config: PreTrainedConfig, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of `measure`, by a process of its own. Raises CommandError where that ends with an error."""
    with tempfile.TemporaryDirectory(prefix=".nearflash-prediction-", dir=path) as folder:
        config.save_pretrained(folder)
        command = [*_COMMAND, str(path), folder, "" if seed is None else str(seed)]
        environment = os.environ | threads_environment()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
    if process.returncode:
        raise CommandError(f"part prediction must end with status 0, not {process.returncode}")


def measure(
    path: Path, config: PreTrainedConfig, seed: int | None = None, policies: int = 10
) -> Iterator[dict[str, Any]]:
    """A row of the machine, one a policy, and how many were predicted well.

    config: of a decoder whose sizes the model has; path: on the disk to measure; seed: None: a random one.
    """
    seed = secrets.randbelow(1 << 16) if seed is None else seed
    random, errors, steady = np.random.default_rng(seed), list[float](), list[bool]()
    with tempfile.TemporaryDirectory(prefix=".nearflash-prediction-", dir=path) as made:
        folders, machines = _Folders(config, Path(made)), dict[str, tuple[Machine, float]]()
        for number in range(policies):
            drawn = random_policy(random, kv_shape_of(config).layers, kv_shape_of(config).dim)
            folder = folders[drawn.weights]
            for tries in range(1, _TRIES + 1):
                busy, rate = max(0, len(os.sched_getaffinity(0)) - idle_processors()), _product_rate()
                if busy or drawn.weights not in machines or not _is_steady(machines[drawn.weights][1], rate):
                    machine = measure_machine(path, "bfloat16", (folder, model_shape(folder)[0]))
                    before, rate = rate, _product_rate()
                    machines[drawn.weights] = machine, fmean((before, rate))
                row = {**_row(drawn, folder, path, *machines[drawn.weights], rate), "tries": tries}
                if is_steady := _is_steady(*row["product_gflops_per_s"]):
                    break
            errors.append(abs(row["error"]))
            steady.append(is_steady)
            yield {"case": f"policy {number}", "seed": seed, **row, "processors_of_others": busy}
    yield {
        "case": "all", "seed": seed, "policies": policies, "error_within_10_percent": sum(e <= _GOOD for e in errors),
        "error_above_20_percent": sum(e > _BAD for e in errors), "worst_error": max(errors),
        "steady": sum(steady),
        "steady_within_10_percent": sum(e <= _GOOD for e, same in zip(errors, steady, strict=True) if same),
        "of": "predicted over measured seconds a token, less one",
    }  # fmt: skip


def _product_rate() -> float:
    """Billions of operations a second of a product in bf16, as a model's layers do it."""
    states, weights = (torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16) for _ in range(2))
    products = times_per_second(lambda: torch.nn.functional.linear(states, weights), _PRODUCT_S)
    return 2 * _SIDE**3 * products / 1e9


def _is_steady(*rates: float) -> bool:
    return max(rates) <= (1 + _GOOD) * min(rates)


def _row(
    drawn: RandomPolicy, folder: Path, path: Path, machine: Machine, profile_rate: float, before: float
) -> dict[str, Any]:
    """Predict and run a policy. profile_rate, before: the product's, in the machine's profile and now."""
    predicted, policy, held = _predict(drawn, folder, machine)
    rate = disk_rate(path)
    prefill_s, decode_s, report = _run(drawn, folder, path)
    rates = profile_rate, before, _product_rate()
    tokens = predicted.generated_tokens
    return {
        "predicted_s_per_token": predicted.seconds / tokens, "measured_s_per_token": (prefill_s + decode_s) / tokens,
        "error": predicted.seconds / (prefill_s + decode_s) - 1,
        "predicted_phases_s": [predicted.prefill_s, predicted.decode_s], "measured_phases_s": [prefill_s, decode_s],
        "predicted_parts_s": {"prefill": predicted.prefill, "decode": predicted.decode}, "waits": report.seconds,
        "weights": drawn.weights, "attention": str(drawn.attention.mode) if drawn.attention else "dense",
        "workload": asdict(drawn.workload), "policy": asdict(policy), "read_gb_per_s": rate,
        "product_gflops_per_s": rates,
        "peak_bytes": report.peak_bytes, "planned_peak_bytes": held,
        "unit": "seconds a new token of all sequences, prompts included",
    }  # fmt: skip


def _predict(drawn: RandomPolicy, folder: Path, machine: Machine) -> tuple[Prediction, OffloadPolicy, dict[str, float]]:
    """As `nearflash generate --plan` would: the file's bytes and the policy's reads are in the plan."""
    shape, stored_fraction = model_shape(folder)
    policy = replace(drawn.policy, stored_fraction=stored_fraction, crossing_fraction=crossing_fraction(folder))
    if drawn.attention is not None:
        kv = kv_shape_of(AutoConfig.from_pretrained(folder, local_files_only=True))
        tokens = drawn.workload.prompt_tokens + drawn.workload.new_tokens
        policy = replace(policy, read_fraction=engine_read_fraction(drawn.attention, kv, tokens))
    held = {name: each.peak_bytes for name, each in peaks(shape, machine, drawn.workload, policy).items()}
    return predict(shape, machine, drawn.workload, policy), policy, held


def _run(drawn: RandomPolicy, folder: Path, path: Path) -> tuple[float, float, OffloadReport]:
    """Seconds of prefill and decode of a block, the mean of some runs, and the last one's report."""
    policy, workload = drawn.policy, drawn.workload
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    ids = torch.randint(3, config.vocab_size, (policy.block_size, workload.prompt_tokens),
                        generator=torch.Generator().manual_seed(1)).tolist()  # fmt: skip
    with OffloadedModel(folder, policy, scratch=path) as opened:
        options: dict[str, Any] = {"stop_tokens": [], "attention": drawn.attention}
        opened.generate(ids, max_new_tokens=2, **options)
        reports = list[OffloadReport]()
        while sum(report.total_s for report in reports) < _LEAST_S:
            reports.append(opened.generate(ids, max_new_tokens=workload.new_tokens, **options).report)
    means = (sum(getattr(report, name) for report in reports) / len(reports) for name in ("prefill_s", "decode_s"))
    return *means, reports[-1]


if __name__ == "__main__":
    main()
