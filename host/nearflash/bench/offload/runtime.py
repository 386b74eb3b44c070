"""Tokens a second with weights and KV cache on this machine's disk: ours by policy, accelerate, and an ablation.

Cases of one run, over the same random prompts of equal length:

    planned              the fastest plan within the memory given, or a policy that is given; its row has what was
                         predicted
    host, disk-weights, disk   by hand: all in memory of the host, whatever it takes; weights on disk; weights and cache
    accelerate, -cold    disk_offload with generate, at each batch size; cold: files dropped from the page cache before
                         each forward pass, as where memory is smaller than the weights. Ours reads past it always
    all-experts          of a mixture with `expert_bytes`: the planned policy that reads every expert with its layer
    no-overlap, no-cpu-attention, accelerate-like   ablation: the planned policy less one thing; one batch at a time

Every token counts, the prompts' time too; loading does not, nor a first run that no row states: memory and disk are
slower when a virtual machine touches them first. same_fraction: prompts whose tokens are those of
transformers with the weights in memory, the same batches and the same order of experts.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM

from nearflash.abi.errors import CommandError
from nearflash.bench.disk import disk_rate
from nearflash.bench.offload.accelerate_case import AccelerateCase, greedy
from nearflash.bench.options import Option
from nearflash.offload import OffloadedModel
from nearflash.offload.machine.plan import machine_here, model_shape, plan_here
from nearflash.planning.cost import expert_seconds, predict
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.search import Workload
from nearflash.weights import open_checkpoint
from nearflash.weights.convert import copy_others, write_model
from nearflash.weights.pretrained import SMOLLM2, load_pretrained, silent_transformers

__all__ = ["run"]

_GPU, _HOST, _DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)


def run(
    model: Annotated[Path | None, Option("Folder of the model (default: SmolLM2-135M in fp32).", Path)] = None,
    path: Annotated[Path | None, Option("Folder on the disk to measure.", Path)] = None,
    sequences: Annotated[int, Option("Prompts.", int)] = 128,
    prompt_tokens: Annotated[int, Option("Tokens of each prompt.", int)] = 64,
    new_tokens: Annotated[int, Option("New tokens of each.", int)] = 32,
    batch_sizes: Annotated[Sequence[int], Option("Of accelerate, the best of them counts.", int, many=True)] = (
        32,
        128,
    ),
    memory_fraction: Annotated[
        float, Option("Plan with this share of the weights' bytes in memory that computes, and in the host's.", float)
    ] = 0.4,
    policy: OffloadPolicy | None = None,
    expert_bytes: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One row a case, and a last one of their ratios. Raises CommandError for counts below 1, PlanError for no plan."""
    if sequences < 1 or prompt_tokens < 1 or new_tokens < 1 or not batch_sizes:
        raise CommandError("sequences, prompt_tokens, new_tokens and batch_sizes must be 1 at least")
    folder = Path(tempfile.gettempdir()) if path is None else path
    with _folder_of(model, folder) as opened:
        sizes = sequences, prompt_tokens, new_tokens
        yield from _rows(opened, folder, sizes, batch_sizes, memory_fraction, policy, expert_bytes)


@contextmanager
def _folder_of(model: Path | None, folder: Path) -> Iterator[Path]:
    """The model's folder; SmolLM2's weights are unpacked to one, in fp32: many CPUs multiply bf16 far slower."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix=".nearflash-smollm2-", dir=folder) as made:
        loaded, tokenizer = load_pretrained(SMOLLM2)
        loaded.config.dtype = torch.float32
        write_model(loaded, Path(made), format="bitmap", bits=16, dtype=torch.float32, compressed=())
        copy_others(loaded, tokenizer, Path(SMOLLM2), Path(made))
        del loaded
        yield Path(made)


def _rows(
    model: Path, folder: Path, sizes: tuple[int, int, int], batch_sizes: Sequence[int], memory_fraction: float,
    policy: OffloadPolicy | None, expert_bytes: int | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    sequences, prompt_tokens, new_tokens = sizes
    if policy is None:
        planned, predicted = _plan(model, folder, sizes, memory_fraction)
    else:
        planned, predicted = policy, _predict(model, folder, sizes, policy, expert_bytes)
    rows = torch.randint(3, _vocabulary(model), (sequences, prompt_tokens), generator=torch.Generator().manual_seed(1))
    measured = _Runtime(model, folder, rows.tolist(), new_tokens)
    yield {"case": "disk", "read_gb_per_s": disk_rate(folder), "unit": "GB/s", "of": "direct reads of 16 MiB"}
    size, count = planned.batch_size, planned.num_batches
    ours = {
        "planned": planned,
        "host": OffloadPolicy(size, count, _HOST, _HOST, _GPU, cpu_attention=True),
        "disk-weights": OffloadPolicy(size, count, _DISK, _HOST, _GPU, cpu_attention=True),
        "disk": OffloadPolicy(size, count, _DISK, _DISK, _GPU),
        "no-overlap": replace(planned, overlap=False),
        "no-cpu-attention": replace(planned, cpu_attention=False, cache=_HOST),
        "accelerate-like": OffloadPolicy(min(size, min(batch_sizes)), 1, _DISK, _GPU, _GPU, overlap=False),
    }
    speeds: dict[str, float] = {}
    fitting = {"disk"}
    if expert_bytes is not None:
        ours["all-experts"] = planned
    measured.warm_up(planned, expert_bytes if planned.weights.disk else None)
    for case, case_policy in ours.items():
        routed = expert_bytes if case_policy.weights.disk and case != "all-experts" else None
        row = measured.ours(case, case_policy, routed)
        if case == "planned":
            row |= _compare(row, predicted)
        speeds[case] = row["tokens_per_second"]
        if case in ("host", "disk-weights") and _fits(row, predicted):
            fitting.add(case)
        yield row
    for cold in (False, True):
        for row in measured.accelerate(batch_sizes, cold=cold):
            speeds[row["case"]] = max(speeds.get(row["case"], 0.0), row["tokens_per_second"])
            yield row
    by_hand = max(speeds[case] for case in fitting)
    yield {
        "case": "ratios", "speedup_planned_over_accelerate": speeds["planned"] / speeds["accelerate"],
        "speedup_planned_over_accelerate_cold": speeds["planned"] / speeds["accelerate-cold"],
        "planned_over_best_by_hand": speeds["planned"] / by_hand, "by_hand_within_the_memory": sorted(fitting),
        "no_overlap_fraction": speeds["no-overlap"] / speeds["planned"],
        "no_cpu_attention_fraction": speeds["no-cpu-attention"] / speeds["planned"],
        "accelerate_like_fraction": speeds["accelerate-like"] / speeds["planned"],
        "of": "tokens per second of all cases, of the planned one for fractions",
    }  # fmt: skip


def _plan(
    model: Path, folder: Path, sizes: tuple[int, int, int], memory_fraction: float
) -> tuple[OffloadPolicy, dict[str, Any]]:
    """The planner's policy, and what it predicts: tokens a second, and bytes of each tier at most."""
    sequences, prompt_tokens, new_tokens = sizes
    weights = sum(tensor.stored_bytes for tensor in open_checkpoint(model).values())
    memory = dict.fromkeys(("gpu_bytes", "host_bytes"), memory_fraction * weights)
    plan = plan_here(model, Workload(prompt_tokens, new_tokens), sequences, folder, memory, again=True)
    return plan.policy, {
        "tokens_per_second": plan.prediction.tokens_per_second,
        "seconds": [plan.prediction.prefill_s, plan.prediction.decode_s],
        "peak_bytes": {tier: peak.peak_bytes for tier, peak in plan.peaks.items()},
        "policy": asdict(plan.policy), "memory_bytes": memory,
    }  # fmt: skip


def _predict(
    model: Path, folder: Path, sizes: tuple[int, int, int], policy: OffloadPolicy, expert_bytes: int | None
) -> dict[str, Any]:
    """Predict a policy's block; with `expert_bytes`, of the first, when no expert is in memory."""
    _, prompt_tokens, new_tokens = sizes
    shape, stored = model_shape(model)
    machine, _ = machine_here(model, shape, folder, stored, again=True)
    workload = Workload(prompt_tokens, new_tokens)
    if expert_bytes is None:
        prediction = predict(shape, machine, workload, policy)
        seconds = prediction.prefill_s, prediction.decode_s
    else:
        share = min(1.0, expert_bytes / sum(tensor.stored_bytes for tensor in open_checkpoint(model).values()))
        seconds = expert_seconds(shape, machine, workload, policy, share)
    speed = policy.block_size * new_tokens / sum(seconds)
    return {"tokens_per_second": speed, "seconds": list(seconds), "peak_bytes": {}}


def _fits(row: dict[str, Any], predicted: dict[str, Any]) -> bool:
    """Whether a policy by hand took no more memory than the plan was given, in all."""
    memory = predicted.get("memory_bytes", {})
    return sum(row["peak_bytes"].get(tier, 0) for tier in ("gpu", "host")) <= sum(memory.values())


def _compare(row: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """The predicted rate over the measured one, less one; and peaks as shares of the predicted ones."""
    if not predicted:
        return {}
    peaks = {tier: size / predicted["peak_bytes"][tier] for tier, size in row["peak_bytes"].items()
             if predicted["peak_bytes"].get(tier)}  # fmt: skip
    return {
        "predicted": predicted,
        "error": predicted["tokens_per_second"] / row["tokens_per_second"] - 1,
        "peak_fraction_of_predicted": peaks,
    }


class _Runtime:
    """Prompts of the cases, and transformers' tokens by batch size."""

    def __init__(self, model: Path, folder: Path, rows: list[list[int]], new_tokens: int) -> None:
        self._model, self._folder, self._rows, self._new = model, folder, rows, new_tokens
        self._plain: dict[tuple[int, bool], list[list[int]]] = {}

    def warm_up(self, policy: OffloadPolicy, expert_bytes: int | None) -> None:
        """Touch the memory that a policy takes, and the model's file."""
        with OffloadedModel(self._model, policy, scratch=self._folder, expert_bytes=expert_bytes) as opened:
            opened.generate(self._rows[: policy.block_size], max_new_tokens=2, stop_tokens=[])

    def ours(self, case: str, policy: OffloadPolicy, expert_bytes: int | None) -> dict[str, Any]:
        """One policy."""
        with OffloadedModel(self._model, policy, scratch=self._folder, expert_bytes=expert_bytes) as opened:
            done = opened.generate(self._rows, max_new_tokens=self._new, stop_tokens=[])
        report = done.report
        tokens = self._row(case, policy.batch_size, done.tokens, report.total_s, one_by_one=bool(expert_bytes))
        return tokens | {
            "num_batches": policy.num_batches, "prefill_seconds": report.prefill_s, "decode_seconds": report.decode_s,
            "phase_seconds": report.seconds, "link_bytes": report.link_bytes, "peak_bytes": report.peak_bytes,
            "expert_hit_rate": report.expert_hit_rate if expert_bytes else None, "experts_ahead": report.experts_ahead,
            "disk_bytes_per_token": _from_disk(report.link_bytes) / report.new_tokens, "load_seconds": report.weights_s,
        }  # fmt: skip

    def accelerate(self, batch_sizes: Sequence[int], *, cold: bool) -> Iterator[dict[str, Any]]:
        """disk_offload at each batch size."""
        case = "accelerate-cold" if cold else "accelerate"
        with AccelerateCase(self._model, self._folder, cold=cold) as peer:
            for size in batch_sizes:
                yield self._row(case, size, *peer.run(self._rows, size, self._new))

    def _row(
        self, case: str, batch_size: int, tokens: list[list[int]], seconds: float, *, one_by_one: bool = False
    ) -> dict[str, Any]:
        plain = self._generate_in_memory(batch_size, one_by_one)
        same = sum(ours == theirs for ours, theirs in zip(tokens, plain, strict=True))
        return {
            "case": case, "batch_size": batch_size, "sequences": len(tokens), "new_tokens": self._new,
            "prompt_tokens": len(self._rows[0]), "tokens_per_second": len(tokens) * self._new / seconds,
            "seconds": seconds, "same_fraction": same / len(tokens), "unit": "new tokens of all sequences per second",
        }  # fmt: skip

    def _generate_in_memory(self, batch_size: int, one_by_one: bool) -> list[list[int]]:
        """transformers' tokens. one_by_one: experts are computed one after another, as where they are loaded so;
        together, as transformers does by itself, sums come in another order and tokens of bf16 may differ.
        """
        key = batch_size, one_by_one
        if key not in self._plain:
            with silent_transformers():
                model = AutoModelForCausalLM.from_pretrained(self._model, local_files_only=True, dtype="auto").eval()
            if one_by_one:
                model.set_experts_implementation("eager")
            self._plain[key] = greedy(model, self._rows, batch_size, self._new)
        return self._plain[key]


def _from_disk(links: dict[str, int]) -> int:
    return sum(moved for link, moved in links.items() if link.endswith("disk to host"))


def _vocabulary(model: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model, local_files_only=True).get_text_config(decoder=True).vocab_size)
