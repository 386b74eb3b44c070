"""A model three times as large as the memory given, from disk: ours as planned, accelerate's disk offload, AirLLM.

The model is a Llama of random weights in bf16, written here, dense and with coded exponents. Each case is a process of
its own in a memory cgroup (nearflash.bench.limits), at each batch size, with files dropped from the page cache before.
Ours has a plan for what the limit leaves beside the interpreter and torch; of the forms of weights, the one that plans
predict to be faster is `chosen`. Where the model fits memory, transformers itself is the peer. Loading a model is not
counted, nor AirLLM's splitting of the checkpoint.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nearflash.abi.errors import PlanError
from nearflash.bench.disk import disk_rate, drop, write_back
from nearflash.bench.limits import limit_memory
from nearflash.offload.machine.measure import measure_machine
from nearflash.offload.machine.plan import crossing_fraction, model_shape
from nearflash.planning.plan_file import write_plan
from nearflash.planning.search import Plan, Space, Workload, search
from nearflash.weights.checkpoint import write_index
from nearflash.weights.compress import compress_tensor, dense_tensor
from nearflash.weights.file import CHECKPOINT, write_file

__all__ = ["measure", "write_llama"]

AIRLLM = "NEARFLASH_AIRLLM"
"""Names the Python of an environment with AirLLM (make airllm)."""
_SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 46, "num_attention_heads": 16,
          "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": True}  # fmt: skip
"""4.1 GB in bf16."""
OWN_BYTES = 640 << 20
"""Of the limit, for the interpreter, torch and its libraries."""
_PROMPT, _NEW = 16, 8
_SHARE = 3


def measure(path: Path, sizes: dict[str, Any] | None = None, batches: Sequence[int] = (1, 8, 32)) -> Iterator[Any]:
    """Rows by case and batch size; files below `path` go at the end."""
    with tempfile.TemporaryDirectory(prefix=".nearflash-larger-", dir=path) as made:
        folder, config = Path(made), LlamaConfig(**(sizes or _SIZES), dtype="bfloat16", eos_token_id=None)
        total = write_llama(folder / "dense", config, "dense")
        write_llama(folder / "coded", config, "coded")
        _write_tokenizer(folder / "dense", config.vocab_size)
        limit = int(total / _SHARE)
        yield {"case": "disk", "read_gb_per_s": disk_rate(path), "model_bytes": total, "limit_bytes": limit}
        plans = {form: _Planner(folder / form, path) for form in ("dense", "coded")}
        for batch in batches:
            yield from _rows(folder, plans, batch, limit)
            yield from _rows(folder, {"dense": plans["dense"]}, batch, None)


def write_llama(folder: Path, config: LlamaConfig, form: str) -> int:
    """A checkpoint of random weights, a file a layer, its layers' matrices in a form; returns the dense bytes."""
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in LlamaForCausalLM(config).named_parameters()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        number = int(name.split(".")[2]) + 2 if ".layers." in name else 1
        file = f"model-{number:05}-of-{config.num_hidden_layers + 1:05}.safetensors"  # AirLLM reads numbers from names
        files.setdefault(file, []).append(name)
    random, checkpoint, stored = torch.Generator().manual_seed(1), secrets.token_hex(16), 0
    for file, names in files.items():
        packed = [_pack(name, shapes[name], random, form if ".layers." in name else "dense") for name in names]
        planned = {each.name: (each.dtype, each.shape) for each in packed}
        stored += write_file(folder / file, planned, packed, {CHECKPOINT: checkpoint})
    places = {name: file for file, names in files.items() for name in names}
    write_index(folder, places, stored, checkpoint)
    return 2 * sum(torch.Size(shape).numel() for shape in shapes.values())


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One of numbers, which AirLLM loads with a model; nothing is tokenised."""
    words = Tokenizer(WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def _pack(name: str, shape: tuple[int, ...], random: torch.Generator, form: str) -> Any:
    if len(shape) == 1:
        value = torch.ones(shape)
    else:
        value = torch.randn(shape, generator=random) * shape[-1] ** -0.5
    patterns = value.to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    if form == "coded" and len(shape) > 1:
        return compress_tensor(name, patterns, "coded")
    return dense_tensor(name, "BF16", shape, patterns.reshape(-1).view("uint8"))


class _Planner:
    """Plans for a folder on this machine, which is measured once."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder = folder
        self._shape, self._stored = model_shape(folder)
        self._crossing = crossing_fraction(folder)
        self._machine = measure_machine(path, "bfloat16", (folder, self._shape))

    def plan(self, batch: int, limit_bytes: int | None) -> Plan:
        """One block of the batch, within what the limit leaves; all that there is without one."""
        machine = self._machine
        left = machine.memory.gpu_bytes + machine.memory.host_bytes
        if limit_bytes is not None:
            left = max(limit_bytes - OWN_BYTES, 0.0)
        machine = machine.with_memory(gpu_bytes=left / 2, host_bytes=left / 2)
        space = Space(
            (batch,), (1,), stored_fraction=self._stored, max_sequences=batch, crossing_fraction=self._crossing
        )
        return search(self._shape, machine, Workload(_PROMPT, _NEW), space)


def _rows(folder: Path, plans: dict[str, _Planner], batch: int, limit: int | None) -> Iterator[dict[str, Any]]:
    """Ours by form, and the peers; each speed over accelerate's, or over transformers' in memory."""
    peer = "transformers" if limit is None else "accelerate"
    rows = {peer: _case(peer, folder / "dense", batch, limit)}
    if limit is not None:
        rows["airllm"] = _case("airllm", folder / "dense", batch, limit)
    found: dict[str, Plan] = {}
    for form, planner in plans.items():
        try:
            found[form] = planner.plan(batch, limit)
        except PlanError as error:  # the peers' rows are of use without it
            rows[form] = {"skipped": str(error)}
    chosen = max(found, key=lambda form: found[form].prediction.tokens_per_second, default=None)
    for form, plan in found.items():
        (folder / "plan.json").unlink(missing_ok=True)
        write_plan(plan, folder / "plan.json")
        row = _case("nearflash", plans[form].folder, batch, limit, folder / "plan.json")
        planned = {tier: peak.peak_bytes for tier, peak in plan.peaks.items()}
        predicted = {"predicted": plan.prediction.tokens_per_second, "chosen": form == chosen}
        rows[form] = row | {"planned_peak_bytes": planned} | predicted
    base, tokens = rows[peer], {case: row.pop("tokens", None) for case, row in rows.items()}
    for case, row in rows.items():
        if "tokens_per_second" in row and "tokens_per_second" in base:
            row[f"speedup_over_{peer}"] = row["tokens_per_second"] / base["tokens_per_second"]
            row["same_tokens"] = tokens[case] == tokens[peer]
        yield {"case": case, "batch_size": batch, "limit_bytes": limit, **row}


def _case(case: str, folder: Path, batch: int, limit: int | None, plan: Path | None = None) -> dict[str, Any]:
    """Run a case in a process; the row that it prints, or why it printed none."""
    python = os.environ.get(AIRLLM) if case == "airllm" else sys.executable
    if python is None:
        return {"skipped": f"{AIRLLM} must name the Python of an environment with AirLLM: make airllm"}
    files = [file for file in folder.rglob("*") if file.is_file()]
    write_back(files)  # who wrote them pays for their pages, and the limit would not count them
    drop(files)
    command = [python, "-m", "nearflash.bench.offload.larger_case", case, folder, batch, _PROMPT, _NEW, plan or "-"]
    given = nullcontext(("nothing", lambda: None)) if limit is None else limit_memory(limit)
    with given as (kind, enter):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"skipped": f"{case} did not end: {last}", "limited_by": kind}
    return {**json.loads(done.stdout.splitlines()[-1]), "limited_by": kind}
