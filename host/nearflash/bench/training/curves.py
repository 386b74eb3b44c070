"""Loss curves of a small language model: torch's AdamW in memory, ours with fp32, bf16 and 8-bit state, and Top-K.

    torch-memory      torch.optim.AdamW, clipped by torch: what the others are compared with
    fp32-state        NearStorageAdamW: the same within rounding
    bf16-state, mx8-state
    topk              1 % of the gradient, what is left out is carried over in 4 bits
    topk-exact        the same in fp32
    topk-no-feedback  1 % of the gradient, what is left out is lost

All begin with the same fp32 weights and see the same batches. A row has the mean loss of each tenth of the steps and
how far that of the last tenth is from torch-memory's.

Models: doclm-7m of the tests' data (the default), doclm-30m of the folder NEARFLASH_MODELS.
"""

import statistics
import tempfile
import time
from collections.abc import Collection, Iterator
from os import environ
from pathlib import Path
from typing import Annotated, Any

import torch

from nearflash.abi.errors import CommandError
from nearflash.bench.options import Option, check_choices
from nearflash.training.finetune import Data, load_model, load_tokens
from nearflash.training.gradients.compression import TopK
from nearflash.training.optimizers.adam import NearStorageAdamW

__all__ = ["run"]

TORCH = "torch-memory"
CASES: dict[str, dict[str, Any]] = {
    TORCH: {},
    "fp32-state": {},
    "bf16-state": {"state_format": "bf16"},
    "mx8-state": {"state_format": "mx8"},
    "topk": {"compression": TopK(0.01)},
    "topk-exact": {"compression": TopK(0.01, residual="fp32")},
    "topk-no-feedback": {"compression": TopK(0.01, feedback=False)},
}
STEPS, WINDOW, BATCH = 200, 64, 2
MAX_NORM = 1.0
SCALARS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_TESTS = Path(__file__).parents[4] / "tests" / "data"


def run(
    parts: Annotated[
        Collection[str] | None, Option("Train in these cases (default: all).", many=True, choices=CASES)
    ] = None,
    model: Annotated[str, Option("Train this model.", metavar="MODEL")] = "doclm-7m",
    path: Annotated[Path | None, Option("Keep state files in this folder.", Path, metavar="FOLDER")] = None,
) -> Iterator[dict[str, Any]]:
    """A row a case (the `parts`). model: its name. path: folder for state files. Raises CommandError."""
    cases = check_choices("parts", parts, CASES)
    folder, text = _files(model)
    base: float | None = None
    for case in sorted(cases, key=lambda case: case != TORCH):  # first what the others are compared with
        network, tokenizer = load_model(folder, "fp32")
        tokens = load_tokens(text, tokenizer, network.config.vocab_size)
        start = time.perf_counter()
        losses, link = _train(case, network, Data(tokens, WINDOW, BATCH, seed=1), path)
        tenths = [statistics.mean(losses[i : i + STEPS // 10]) for i in range(0, STEPS, STEPS // 10)]
        base = tenths[-1] if case == TORCH else base
        yield {
            "case": case,
            "model": model,
            "steps": STEPS,
            "loss_by_tenth": tenths,
            "last_loss": tenths[-1],
            "last_loss_over_torch_percent": None if base is None else 100 * (tenths[-1] / base - 1),
            "gradient_bytes_per_param": link,
            "seconds": time.perf_counter() - start,
            "unit": "nats a token, mean over a tenth of the steps",
        }


def _train(case: str, model: Any, data: Data, path: Path | None) -> tuple[list[float], float | None]:
    """The loss of each step, and bytes of gradients to the device a parameter and step."""
    if case == TORCH:
        plain = torch.optim.AdamW(model.parameters(), **SCALARS)
        return [_step(model, data.at(step), plain, clip=True) for step in range(STEPS)], None
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path) as inside:
        with NearStorageAdamW(
            model.parameters(), path=inside, max_grad_norm=MAX_NORM, **SCALARS, **CASES[case]
        ) as optimizer:
            losses = [_step(model, data.at(step), optimizer, clip=False) for step in range(STEPS)]
            return losses, optimizer.report.traffic.to_device_bytes / optimizer.report.traffic.params


def _step(model: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer, *, clip: bool) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _files(model: str) -> tuple[Path, Path]:
    """Folder of the model, and what it is trained on."""
    if model == "doclm-7m":
        return _TESTS / model, _TESTS / "finetune.txt"
    if model == "doclm-30m":
        if "NEARFLASH_MODELS" not in environ:
            raise CommandError("model must be doclm-7m where NEARFLASH_MODELS, a folder with doclm-30m, is not set")
        models = Path(environ["NEARFLASH_MODELS"])
        return models / model, models / "eval_tokens.npy"
    raise CommandError(f"model must be doclm-7m or doclm-30m, not {model!r}")
