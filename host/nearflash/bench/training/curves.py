"""Loss curves of a small language model: torch's AdamW and Muon in memory, ours with all kinds of state, and Top-K.

    torch-memory      torch.optim.AdamW, clipped by torch: what the others are compared with
    fp32-state        NearStorageAdamW: the same within rounding
    bf16-state, mx8-state
    topk              1 % of the gradient from the first step on, what is left out is carried over in 4 bits
    topk-exact        the same in fp32
    topk-unsaved      the same in 4 bits, not saved: the same curve, as nothing is resumed here, for fewer bytes
    topk-warmup       1 % is reached after 100 steps, exponentially, as by default (Deep Gradient Compression)
    topk-no-feedback  1 % of the gradient, what is left out is lost
    torch-muon        torch.optim.Muon for the layers' matrices, torch.optim.AdamW for all else, clipped together
    muon              NearStorageMuon: compared with torch-muon

All begin with the same fp32 weights and see the same batches. A row has the mean loss of each tenth of the steps and
how far that of the last tenth is from torch's.

Models: doclm-7m of the tests' data (the default), doclm-30m of the folder NEARFLASH_MODELS, on text that is new to it;
with random weights either's shape, on the text of the tests' data.
"""

import statistics
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import environ
from pathlib import Path
from typing import Annotated, Any

import torch

from nearflash.abi.errors import CommandError
from nearflash.bench.options import Option, check_choices
from nearflash.training.finetune import Data, load_model, load_tokens
from nearflash.training.gradients.compression import TopK
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.muon import NearStorageMuon

__all__ = ["run"]

TORCH, TORCH_MUON, MUON = "torch-memory", "torch-muon", "muon"
CASES: dict[str, dict[str, Any]] = {
    TORCH: {},
    "fp32-state": {},
    "bf16-state": {"state_format": "bf16"},
    "mx8-state": {"state_format": "mx8"},
    "topk": {"compression": TopK(0.01, warmup_steps=0)},
    "topk-exact": {"compression": TopK(0.01, residual="fp32", warmup_steps=0)},
    "topk-unsaved": {"compression": TopK(0.01, saved=False, warmup_steps=0)},
    "topk-warmup": {"compression": TopK(0.01)},
    "topk-no-feedback": {"compression": TopK(0.01, feedback=False, warmup_steps=0)},
    TORCH_MUON: {},
    MUON: {},
}
WEIGHTS = ("trained", "random")
WINDOW, BATCH = 64, 2
MAX_NORM = 1.0
SCALARS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MUON_SCALARS: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
"""With updates as large as AdamW's, at its learning rate."""
SHAPES = {"doclm-7m": (256, 6, 2, 768), "doclm-30m": (512, 8, 4, 1408)}
"""Hidden size, layers, heads, and the size between a layer's matrices."""
_TESTS = Path(__file__).parents[4] / "tests" / "data"


def run(
    parts: Annotated[
        Collection[str] | None, Option("Train in these cases (default: all).", many=True, choices=CASES)
    ] = None,
    model: Annotated[str, Option("Train this model.", metavar="MODEL")] = "doclm-7m",
    weights: Annotated[str, Option("Begin with the model's weights, or random ones.", choices=WEIGHTS)] = "trained",
    steps: Annotated[int, Option("Train so many steps, a multiple of 10.", int, metavar="N")] = 200,
    path: Annotated[Path | None, Option("Keep state files in this folder.", Path, metavar="FOLDER")] = None,
) -> Iterator[dict[str, Any]]:
    """A row a case (the `parts`). model: its name. path: folder for state files. Raises CommandError."""
    cases = check_choices("parts", parts, CASES)
    check_choices("weights", [weights], WEIGHTS)
    if steps < 10 or steps % 10:
        raise CommandError(f"steps must be a multiple of 10, not {steps}")
    make = _make_random if weights == "random" else _load_trained
    losses_of: dict[str, float] = {}
    for case in sorted(cases, key=lambda case: not case.startswith("torch")):  # first what others are compared with
        network, tokens = make(model)
        start = time.perf_counter()
        losses, link = _train(case, network, Data(tokens, WINDOW, BATCH, seed=1), steps, path)
        tenths = [statistics.mean(losses[i : i + steps // 10]) for i in range(0, steps, steps // 10)]
        losses_of[case] = tenths[-1]
        reference = TORCH_MUON if case in (MUON, TORCH_MUON) else TORCH
        base = losses_of.get(reference)
        yield {
            "case": case,
            "model": model,
            "weights": weights,
            "steps": steps,
            "loss_by_tenth": tenths,
            "last_loss": tenths[-1],
            "last_loss_over_torch_percent": None if base is None else 100 * (tenths[-1] / base - 1),
            "torch_case": reference,
            "gradient_bytes_per_param": link,
            "seconds": time.perf_counter() - start,
            "unit": "nats a token, mean over a tenth of the steps",
        }


def _train(case: str, model: Any, data: Data, steps: int, path: Path | None) -> tuple[list[float], float | None]:
    """The loss of each step, and bytes of gradients to the device a parameter and step."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as open_case:
        if case in (TORCH, TORCH_MUON):
            plain = _open_torch(case, model)
            return [_step(model, data.at(step), plain, clip=True) for step in range(steps)], None
        optimizer = open_case.enter_context(_open_ours(case, model, path))
        losses = [_step(model, data.at(step), [optimizer], clip=False) for step in range(steps)]
        return losses, optimizer.report.traffic.to_device_bytes / optimizer.report.traffic.params


def _open_torch(case: str, model: Any) -> list[torch.optim.Optimizer]:
    if case == TORCH:
        return [torch.optim.AdamW(model.parameters(), **SCALARS)]
    hidden, rest = _split(model)
    return [torch.optim.Muon(hidden, **MUON_SCALARS), torch.optim.AdamW(rest, **SCALARS)]


@contextmanager
def _open_ours(case: str, model: Any, path: Path | None) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(dir=path) as inside:
        options = {"path": inside, "max_grad_norm": MAX_NORM, **CASES[case]}
        if case == MUON:
            hidden, rest = _split(model)
            groups = [{"params": hidden}, {"params": rest, "use_muon": False, **SCALARS}]
            optimizer: Any = NearStorageMuon(groups, **MUON_SCALARS, **options)
        else:
            optimizer = NearStorageAdamW(model.parameters(), **SCALARS, **options)
        with optimizer:
            yield optimizer


def _split(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The layers' matrices, and all else: embeddings, which the head may be tied to, and norms."""
    named = list(model.named_parameters())
    hidden = [tensor for name, tensor in named if tensor.ndim == 2 and ".layers." in name]
    chosen = {id(tensor) for tensor in hidden}
    return hidden, [tensor for _, tensor in named if id(tensor) not in chosen]


def _step(model: Any, ids: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer], *, clip: bool) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _load_trained(name: str) -> tuple[Any, torch.Tensor]:
    folder, text = _files(name)
    network, tokenizer = load_model(folder, "fp32")
    return network, load_tokens(text, tokenizer, network.config.vocab_size)


def _make_random(name: str) -> tuple[Any, torch.Tensor]:
    """Raises CommandError for a model whose shape is not known."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if name not in SHAPES:
        raise CommandError(f"model must be doclm-7m or doclm-30m, not {name!r}")
    known, tokens = _load_trained("doclm-7m")
    hidden, layers, heads, middle = SHAPES[name]
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=known.config.vocab_size, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=128, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), tokens


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
