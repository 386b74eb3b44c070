"""One case of the bench's part `forward`, in a process of its own: passes of a model whose layers are on disk.

    python -m nearflash.bench.weights.forward_case accelerate|nearflash FOLDER LIMIT_BYTES

Prints a JSON object: seconds (median of the passes), passes, peak_bytes (largest resident set), logits (a digest).
"""

import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nearflash.support.process import peak_resident_bytes
from nearflash.weights.loading import load
from nearflash.weights.pretrained import silent_transformers

__all__ = ["main"]

_PASSES = 5
_TOKENS = 16
_OWN_BYTES = 768 << 20
"""Of the limit, for the interpreter, torch, and activations."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    case, folder, limit = sys.argv[1:] if argv is None else argv
    with silent_transformers(), tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = _accelerate(Path(folder), scratch) if case == "accelerate" else _ours(Path(folder), int(limit))
        ids = torch.arange(_TOKENS)[None] * 97 % model.config.vocab_size
        seconds, logits = [], torch.empty(0)
        with torch.no_grad():
            for _ in range(_PASSES + 1):
                start = time.perf_counter()
                logits = model(ids, use_cache=False).logits
                seconds.append(time.perf_counter() - start)
    row = {
        "seconds": statistics.median(seconds[1:]),
        "seconds_range": [min(seconds[1:]), max(seconds[1:])],
        "passes": _PASSES,
        "tokens": _TOKENS,
        "peak_bytes": peak_resident_bytes(),
        "logits": hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()[:16],
    }
    print(json.dumps(row))


def _ours(folder: Path, limit_bytes: int) -> Any:
    return load(AutoModelForCausalLM, folder, budget=limit_bytes - _OWN_BYTES)


def _accelerate(folder: Path, scratch: str) -> Any:
    """Its own disk offload: the decoder's layers on disk, read from the checkpoint, the rest in memory."""
    layers = AutoConfig.from_pretrained(folder, local_files_only=True).num_hidden_layers
    places: dict[str, Any] = {f"model.decoder.layers.{number}": "disk" for number in range(layers)}
    others = (
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.final_layer_norm",
        "lm_head",
    )
    places.update(dict.fromkeys(others, "cpu"))
    return AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, device_map=places, offload_folder=scratch, dtype="auto"
    ).eval()


if __name__ == "__main__":
    main()
