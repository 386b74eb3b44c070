"""One case of the bench's part `larger`, in a process of its own: new tokens of a batch of random prompts.

    python -m nearflash.bench.offload.larger_case CASE FOLDER BATCH PROMPT_TOKENS NEW_TOKENS PLAN

CASE: nearflash (by the PLAN), accelerate (disk_offload of every layer), airllm, or transformers (in memory). Prints a
JSON object: tokens, seconds, tokens_per_second, peak_bytes (largest resident set), and what ours moved and waited for.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nearflash.support.process import peak_resident_bytes
from nearflash.weights.pretrained import silent_transformers

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    case, name, batch, prompt, new, plan = sys.argv[1:] if argv is None else argv
    folder = Path(name)
    vocabulary = AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (int(batch), int(prompt)), generator=generator)
    if case == "nearflash":
        tokens, seconds, more = _ours(folder, Path(plan), ids, int(new))
    else:
        with silent_transformers(), tempfile.TemporaryDirectory(dir=folder) as scratch:
            tokens, seconds = _peer(case, folder, Path(scratch), ids, int(new))
        more = {}
    rate = int(batch) * int(new) / seconds
    print(json.dumps({"tokens": tokens, "seconds": seconds, "tokens_per_second": rate,
                      "peak_bytes": peak_resident_bytes(), **more}))  # fmt: skip


def _ours(folder: Path, plan: Path, ids: torch.Tensor, new: int) -> tuple[list[list[int]], float, dict[str, Any]]:
    from nearflash.offload import OffloadedModel
    from nearflash.planning.plan_file import read_plan

    with OffloadedModel(folder, read_plan(plan).policy) as opened:
        done = opened.generate(ids.tolist(), max_new_tokens=new, stop_tokens=[])
    report = done.report
    read = sum(moved for link, moved in report.link_bytes.items() if link.endswith("disk to host"))
    return done.tokens, report.total_s, {
        "held_peak_bytes": report.peak_bytes, "phase_seconds": report.seconds, "disk_bytes": read,
        "disk_gb_per_s": read / report.total_s / 1e9,
    }  # fmt: skip


def _peer(case: str, folder: Path, scratch: Path, ids: torch.Tensor, new: int) -> tuple[list[list[int]], float]:
    options: dict[str, Any] = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
                                   eos_token_id=None)  # fmt: skip
    if case == "airllm":
        from airllm import AutoModel  # type: ignore[import-not-found]

        model = AutoModel.from_pretrained(str(folder), device="cpu", layer_shards_saving_path=str(scratch),
                                          dtype=torch.bfloat16)  # fmt: skip
    else:
        places = _disk_places(folder) if case == "accelerate" else None
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, device_map=places, offload_folder=scratch if places else None, dtype="auto"
        ).eval()
    start = perf_counter()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[:, ids.shape[1] :].tolist(), perf_counter() - start


def _disk_places(folder: Path) -> dict[str, str]:
    """Every layer on disk, read from the checkpoint; the rest in memory."""
    layers = AutoConfig.from_pretrained(folder, local_files_only=True).num_hidden_layers
    others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dict.fromkeys(others, "cpu") | {f"model.layers.{number}": "disk" for number in range(layers)}


if __name__ == "__main__":
    main()
