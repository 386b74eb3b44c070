"""A pass of a model with the shape of OPT-1.3B, its layers on disk, under a cap of memory: accelerate, and ours.

The weights are random, half of them pruned by magnitude, in bf16. Each case is a process of its own in a memory cgroup
(v1 or v2) whose limit counts the page cache, too; where no cgroup can be made, the limit is of the process's data
(RLIMIT_DATA), and the row has that. Both run the same inputs and must give the same logits.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

from nearflash.bench.disk import disk_rate, drop, write_back
from nearflash.bench.limits import limit_memory
from nearflash.weights.convert import layer_weights, write_model

__all__ = ["DENSE", "MEDIAN_MAGNITUDE", "UNPRUNED", "LargeModel", "large_model", "measure"]

DENSE, UNPRUNED = "dense", "coded-unpruned"
FORMATS = {"bitmap": ("bitmap", 16), "coded-bitmap": ("coded-bitmap", 16), "bitmap-int8": ("coded-bitmap", 8),
           "coded": ("coded", 16), UNPRUNED: ("coded", 16)}  # fmt: skip
SHAPE = {"hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32, "vocab_size": 50272,
         "word_embed_proj_dim": 2048, "max_position_embeddings": 2048}  # fmt: skip
"""Of OPT-1.3B. Source: facebook/opt-1.3b, config.json."""
MEDIAN_MAGNITUDE = 0.6745
"""Of the magnitude of a normal number: half of them are smaller."""
_LIMIT_BYTES = 3 << 29


@dataclass(frozen=True)
class LargeModel:
    """Folders of one model in several formats."""

    formats: dict[str, Path]
    names: list[str]
    """Of the decoder layers' linear weights."""
    dense_bytes: int
    """Of the whole model."""


@contextmanager
def large_model(path: Path, shape: dict[str, int] | None = None) -> Iterator[LargeModel]:
    """The model's folders, below `path`; they are removed at the end. All but UNPRUNED are of pruned weights."""
    torch.manual_seed(0)
    config = OPTConfig(**(shape or SHAPE), dropout=0.0)
    model = OPTForCausalLM._from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    names = layer_weights(model)
    with tempfile.TemporaryDirectory(prefix=".nearflash-opt-", dir=path) as folder:
        formats = {name: Path(folder) / name for name in (DENSE, *FORMATS)}
        _write(model, formats[UNPRUNED], names)
        for name in names:
            weight = model.get_parameter(name)
            weight[weight.abs() < MEDIAN_MAGNITUDE * weight.float().std()] = 0
        for name in formats.keys() - {UNPRUNED}:
            _write(model, formats[name], names)
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        del model
        yield LargeModel(formats, names, size)


def _write(model: Any, folder: Path, names: list[str]) -> None:
    """The folder of a format, which it is named by."""
    form, bits = FORMATS.get(folder.name, ("bitmap", 16))
    compressed = names if folder.name != DENSE else ()
    write_model(model, folder, format=form, bits=bits, dtype=torch.bfloat16, compressed=compressed)
    model.config.save_pretrained(folder)


def measure(folders: LargeModel, path: Path, limit_bytes: int = _LIMIT_BYTES) -> Iterator[dict[str, Any]]:
    """A row for accelerate's disk offload and one for each lossless format of ours."""
    rate, rows = disk_rate(path), {"accelerate": _case("accelerate", folders.formats[DENSE], limit_bytes)}
    for format in ("bitmap", "coded-bitmap"):
        rows[format] = _case("nearflash", folders.formats[format], limit_bytes)
    base = rows["accelerate"]
    for case, row in rows.items():
        more = {}
        if "seconds" in row and "seconds" in base:
            more = {"speedup_over_accelerate": base["seconds"] / row["seconds"],
                    "mismatches": int(row["logits"] != base["logits"])}  # fmt: skip
        if "peak_bytes" in row:
            more["peak_fraction_of_dense_bytes"] = row["peak_bytes"] / folders.dense_bytes
        yield {"case": case, **row, **more, "limit_bytes": limit_bytes, "dense_bytes": folders.dense_bytes,
               "disk_read_gbps": rate}  # fmt: skip


def _case(case: str, folder: Path, limit_bytes: int) -> dict[str, Any]:
    """Run a case in a process; the row that it prints, or why it printed none."""
    files = list(folder.iterdir())
    write_back(files)  # who wrote them pays for their pages, and the limit would not count them
    drop(files)
    command = [sys.executable, "-m", "nearflash.bench.weights.forward_case", case, str(folder), str(limit_bytes)]
    with limit_memory(limit_bytes) as (kind, enter):
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"skipped": f"{case} did not end: {last}", "limited_by": kind}
    return {**json.loads(done.stdout.splitlines()[-1]), "limited_by": kind}
