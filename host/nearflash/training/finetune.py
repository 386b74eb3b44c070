"""Fine-tuning of a language model on a file of text or tokens: what `nearflash train` does, for scripts too.

A batch depends on its number and the seed alone, and each step commits the next one's number (skipped steps take
batches, too) and the states of the random generators, so a run that was stopped resumes with the batch and the dropout
that it would have had.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearflash.abi.errors import CommandError, StateError
from nearflash.support.files import open_regular, read_text
from nearflash.training.generators import generator_states, restore_generators
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.stalls import Stalls

__all__ = ["DTYPES", "Data", "TrainingProgress", "digest_of", "fine_tune", "load_model", "load_tokens", "save_model"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_MAX_TEXT_BYTES = 1 << 34


@dataclass(frozen=True)
class Data:
    """Tokens cut into sequences, which are shuffled again for each epoch."""

    tokens: torch.Tensor
    """(n,), int64."""
    seq_length: int
    """Tokens of a sequence."""
    batch_size: int
    """Sequences of a step."""
    seed: int

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise CommandError(f"seq_length must be at least 2, a token and the one after it, not {self.seq_length}")
        if len(self.tokens) < self.seq_length:
            raise CommandError(
                f"data must have at least {self.seq_length} tokens (one sequence), not {len(self.tokens)}"
            )

    def at(self, number: int) -> torch.Tensor:
        """Token ids (batch_size, seq_length) of a batch, counted from 0."""
        sequences = len(self.tokens) // self.seq_length
        rows = []
        for index in range(number * self.batch_size, (number + 1) * self.batch_size):
            epoch, offset = divmod(index, sequences)
            start = int(_order(sequences, self.seed + epoch)[offset]) * self.seq_length
            rows.append(self.tokens[start : start + self.seq_length])
        return torch.stack(rows)

    def cursor(self) -> dict[str, Any]:
        """Values that must be the same in a run that resumes."""
        return {
            "tokens": len(self.tokens),
            "digest": self._digest,
            "seq_length": self.seq_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.tokens.numpy().astype("<i8", copy=False).data).hexdigest()


@lru_cache(maxsize=2)
def _order(sequences: int, seed: int) -> torch.Tensor:
    """Indices of the sequences, (sequences,), in the order of one epoch."""
    return torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class TrainingProgress:
    """After a step."""

    step: int
    steps: int
    loss: float
    """Nats a token, of the step's batch, before the step."""
    tokens_per_s: float
    """Of this run so far."""
    optimizer_s: float
    """Of this step."""
    remaining_s: float
    stalls: Stalls


def fine_tune(
    model: Any, data: Data, optimizer: NearStorageOptimizer, steps: int, *, digest: str | None = None
) -> Iterator[TrainingProgress]:
    """Train up to step `steps` of the state, from where it is; a run that resumes sets the random generators, too.

    digest: `digest_of` the model as it was before the optimizer was made. Raises CommandError for sequences longer than
    the model has positions, StateError for a state of other data or of another model.
    """
    _check_positions(model, data.seq_length)
    if optimizer.steps:
        _check_run(optimizer, data, digest)
        if (states := optimizer.metadata.get("generators")) is not None:
            restore_generators(states)
    if digest is not None:
        optimizer.metadata["model"] = digest
    optimizer.metadata["data"] = data.cursor()
    device = next(model.parameters()).device
    model.train()
    began, first, seen = time.perf_counter(), optimizer.steps, 0
    number = optimizer.metadata.get("batch", first)
    while optimizer.steps < steps:
        before = optimizer.steps
        ids = data.at(number).to(device)
        number += 1
        optimizer.metadata["batch"] = number  # committed with the step; a skipped one commits nothing
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.scale_loss(loss).backward()
        optimizer.metadata["generators"] = generator_states()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        seen += ids.numel()
        if optimizer.steps > before:
            done, rate = optimizer.steps - first, seen / (now - began)
            remaining = (steps - optimizer.steps) * (now - began) / done
            yield TrainingProgress(
                optimizer.steps, steps, float(loss.detach()), rate, now - middle, remaining, optimizer.report.stalls
            )


def _check_positions(model: Any, seq_length: int) -> None:
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < seq_length:
        raise CommandError(
            f"seq_length must be at most {positions}, the positions of the model, not {seq_length}; pass "
            f"--seq-length {positions}"
        )


def _check_run(optimizer: NearStorageOptimizer, data: Data, digest: str | None) -> None:
    """Raise StateError where the state is of other data or of another model."""
    stored, given = optimizer.metadata.get("data"), data.cursor()
    if not stored or any(value != given.get(key) for key, value in stored.items()):
        raise StateError(
            f"data must be that of {optimizer.store.path}, {stored}, not {given}; give the same data, sequence length, "
            "batch size and seed, or begin on another path"
        )
    if digest is not None and (began := optimizer.metadata.get("model", digest)) != digest:
        raise StateError(
            f"model must be the one that the run on {optimizer.store.path} began with, of digest {began[:16]}, not "
            f"{digest[:16]}; give that one to resume, or begin with this one on another path"
        )


def digest_of(model: Any, folder: Path) -> str:
    """Digest that tells a model, as it was loaded, from all others: of its config.json and all of its tensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_model(folder: Path, dtype: str) -> tuple[Any, Any]:
    """(causal language model, its tokenizer or None) of a transformers folder.

    Raises CommandError, WeightsError and UnsupportedError as nearflash.weights.pretrained does; also for an adapter
    beside the weights or quantised weights, which training would lose.
    """
    from nearflash.weights import pretrained
    from nearflash.weights.folder import has_tokenizer

    verbose = environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == "0"
    model = pretrained.load_model(folder, dtype, verbose=verbose, adapter="rejected", quantized=False, gguf=False)
    model.config.use_cache = False
    tokenizer = pretrained.load_tokenizer(folder) if has_tokenizer(folder) else None
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def save_model(model: Any, tokenizer: Any, source: Path, folder: Path) -> None:
    """Write a model that `load_model` read from `source`; it generates with a cache as that one does."""
    from nearflash.weights.folder import open_folder

    model.config.use_cache = open_folder(source).config.get("use_cache", True)  # training alone does without
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_tokens(path: Path, tokenizer: Callable[..., Any] | None, vocabulary: int) -> torch.Tensor:
    """Token ids (n,) of a .npy file of integers, or of a text. Raises CommandError."""
    try:
        if path.suffix == ".npy":
            with os.fdopen(open_regular(path), "rb") as file:
                array = np.load(file, allow_pickle=False)
        elif tokenizer is None:
            raise CommandError("data must be tokens (.npy), not text: the model's folder has no tokenizer")
        else:
            array = np.asarray(tokenizer(read_text(path, _MAX_TEXT_BYTES), verbose=False)["input_ids"])
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError) as error:
        if isinstance(error, CommandError):
            raise
        raise CommandError(f"data must be a readable text or .npy file, not {str(path)!r}: {error}") from error
    if isinstance(array, np.ndarray) and not array.size:
        raise CommandError(f"data must have tokens, but {str(path)!r} has none")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 1:
        given = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise CommandError(
            f"data must be one row of integers, token ids in their order, but {str(path)!r} holds {given}: save "
            "the row (of several rows numpy.concatenate makes one)"
        )
    if not 0 <= array.min() <= array.max() < vocabulary:
        raise CommandError(
            f"data must be token ids below {vocabulary}, but those of {str(path)!r} are {array.min()} to "
            f"{array.max()}: take the model's own tokenizer"
        )
    return torch.from_numpy(array.astype(np.int64))
