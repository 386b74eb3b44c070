"""The commands `nearflash preflight` and `nearflash train`."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, MasterFormat, OptimizerStep, SgdStep, StateFormat
from nearflash.support.arguments import Ineffective, above_zero, declare_ineffective, non_negative, positive, rate
from nearflash.support.files import check_replaceable, check_writable
from nearflash.support.progress import print_step

if TYPE_CHECKING:
    from nearflash.training import TopK
    from nearflash.training.finetune import TrainingProgress
    from nearflash.training.optimizers.optimizer import NearStorageOptimizer

__all__ = ["preflight", "train"]

_RULES: dict[str, Callable[..., OptimizerStep]] = {
    "adamw": partial(AdamStep, 0.0, 1),
    "adam": partial(AdamStep, 0.0, 1),
    "sgd": partial(SgdStep, 0.0, 1),
    "sgd-momentum": partial(SgdStep, 0.0, 1, momentum=0.9),
    "adagrad": partial(AdagradStep, 0.0, 1),
    "lion": partial(LionStep, 0.0, 1),
}
_TOPK_CHOICES = ("residual", "values", "warmup", "unsaved")
_NO_MOMENTS = Ineffective(
    ("state_format",),
    lambda given: given.optimizer == "sgd",
    "left out with --optimizer sgd, which has no moments without momentum",
)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_PREFLIGHT_EXAMPLES = """examples:
  nearflash preflight /mnt/nvme --params 135M
  nearflash preflight /mnt/a /mnt/b --params 7B --state-format bf16 --tbw 600
"""
_TRAIN_EXAMPLES = """examples:
  nearflash train --model tests/data/doclm-7m --data tests/data/finetune.txt --path /mnt/nvme --steps 100
  nearflash train --model MODEL --data tokens.npy --path /mnt/a /mnt/b --state-format bf16 --topk 0.01
"""


def preflight(subparsers: Any) -> None:
    """Add `nearflash preflight PATH… --params N`; exit code 1 where a path cannot take its share of the state."""
    parser = subparsers.add_parser("preflight", epilog=_PREFLIGHT_EXAMPLES)
    parser.add_argument("paths", nargs="+", type=Path, help="Folders or state files, one a drive, with equal shares.")
    parser.add_argument("--params", required=True, type=_count, help="Parameters of the model, such as 135M or 7B.")
    parser.add_argument("--optimizer", default="adamw", choices=_RULES, help="Optimizer whose state is stored.")
    parser.add_argument(
        "--state-format", default=StateFormat.FP32, type=StateFormat, choices=[*StateFormat],
        help="Format of the moments.",
    )  # fmt: skip
    _add_master(parser)
    parser.add_argument("--tbw", type=above_zero, metavar="TB", help="Rated writes of the drive, in terabytes.")
    parser.add_argument("--no-measure", action="store_true", help="Write no file to measure rates with.")
    parser.set_defaults(run=_preflight)
    declare_ineffective(parser, _NO_MOMENTS)


def _preflight(arguments: argparse.Namespace) -> int:
    from nearflash.training.preflight import Severity, StateSizes, preflight

    rule = _RULES[arguments.optimizer](state_format=arguments.state_format)
    share = StateSizes(-(-arguments.params // len(arguments.paths)), rule, arguments.master)
    errors, drives = 0, [_drive(path) for path in arguments.paths]
    for path, drive in zip(arguments.paths, drives, strict=True):
        print(f"{path}:")
        options = {"rated_tb": arguments.tbw, "measure": not arguments.no_measure, "sharing": drives.count(drive)}
        for finding in preflight(path, share, **options):
            print(f"  {finding}")
            errors += finding.level is Severity.ERROR
    return 1 if errors else 0


def _drive(path: Path) -> int | Path:
    """Key of the file system that holds a state; the path itself where it cannot be there."""
    try:
        return (path if path.is_dir() else path.parent).stat().st_dev
    except OSError:
        return path


def train(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    for package in ("torch", "transformers", "accelerate"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser = subparsers.add_parser("train", epilog=_TRAIN_EXAMPLES)
    parser.add_argument("--model", required=True, type=Path, help="Folder of a transformers model.")
    parser.add_argument("--data", required=True, type=Path, help="A text file, or token ids in a .npy file.")
    parser.add_argument("--path", required=True, type=Path, nargs="+", help="State files or folders, one a device.")
    parser.add_argument(
        "--device", default=["host"], nargs="+", help="Devices: a backend, or a name of `nearflash devices`."
    )
    parser.add_argument("--steps", type=non_negative, default=100, help="Steps of the state, earlier runs included.")
    parser.add_argument(
        "--no-resume", action="store_true", help="Stop with an error where a state exists, instead of resuming from it."
    )
    parser.add_argument("--optimizer", default="adamw", choices=_OPTIMIZERS, help="Optimizer.")
    parser.add_argument("--lr", type=rate, default=1e-4, help="Learning rate.")
    parser.add_argument("--seq-length", type=positive, default=256, metavar="N", help="Tokens of a sequence.")
    parser.add_argument("--batch-size", type=positive, default=4, metavar="N", help="Sequences of a step.")
    parser.add_argument("--seed", type=non_negative, default=0, help="Seed of the order of sequences and of dropout.")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"), help="Number format of the model.")
    parser.add_argument(
        "--state-format", default=StateFormat.FP32, type=StateFormat, choices=[*StateFormat],
        help="Format of the moments.",
    )  # fmt: skip
    _add_master(parser)
    parser.add_argument(
        "--max-grad-norm", type=rate, default=1.0, help="Clip the norm of the gradient to this; 0 clips nothing."
    )
    _add_topk(parser)
    parser.add_argument("--overlap", default="step", choices=("step", "backward"), help="When updates begin.")
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="Threads of the processor; else OMP_NUM_THREADS, else those that are idle.",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="Write the model to this folder at the end.")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Write a timeline for ui.perfetto.dev.")
    parser.set_defaults(run=_train)
    choices = tuple(f"topk_{name}" for name in _TOPK_CHOICES)
    declare_ineffective(
        parser,
        Ineffective(choices, lambda given: given.topk is None, "given with --topk, the share that is sent"),
        Ineffective(
            ("topk_unsaved",),
            lambda given: given.topk_residual == "none",
            "left out with --topk-residual none, which holds nothing",
        ),
        _NO_MOMENTS,
    )


def _add_master(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master", default=MasterFormat.FP32, type=MasterFormat, choices=[*MasterFormat],
        help="Format of the masters: split stores 16 bits beside bf16 weights.",
    )  # fmt: skip


_OPTIMIZERS = {
    "adamw": "NearStorageAdamW",
    "adam": "NearStorageAdam",
    "sgd": "NearStorageSGD",
    "adagrad": "NearStorageAdagrad",
    "lion": "NearStorageLion",
}


def _train(arguments: argparse.Namespace) -> int:
    from nearflash.support.threads import set_threads

    set_threads(arguments.threads)  # before torch is loaded

    from nearflash import training
    from nearflash.training.finetune import Data, digest_of, fine_tune, load_model, load_tokens, save_model
    from nearflash.training.generators import seed_generators

    _check_outputs(arguments)
    if arguments.master is MasterFormat.SPLIT and arguments.dtype != "bf16":
        raise CommandError(
            f"--dtype must be bf16, not {arguments.dtype}, with --master split, which stores 16 bits beside it"
        )
    model, tokenizer = load_model(arguments.model, arguments.dtype)
    tokens = load_tokens(arguments.data, tokenizer, model.config.vocab_size)
    data = Data(tokens, arguments.seq_length, arguments.batch_size, arguments.seed)
    kind, digest = getattr(training, _OPTIMIZERS[arguments.optimizer]), digest_of(model, arguments.model)
    seed_generators(arguments.seed)
    with kind(model.named_parameters(), lr=arguments.lr, **_options(arguments)) as optimizer:
        if optimizer.steps:
            print(f"resuming from step {optimizer.steps} of {_files(optimizer)}", file=sys.stderr)
        for progress in fine_tune(model, data, optimizer, arguments.steps, digest=digest):
            _print_progress(progress)
        print("\n".join(_summary(optimizer)), file=sys.stderr)
        if arguments.trace:
            optimizer.report.timeline.write(arguments.trace)
    if arguments.save:
        save_model(model, tokenizer, arguments.model, arguments.save)
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raise CommandError for a model's folder and a trace that cannot be written, or must not be."""
    save: Path | None = arguments.save
    if save and save.exists() and not save.is_dir():
        raise CommandError(f"--save must name a folder, not the file {str(save)!r}")
    if save and save.exists() and arguments.model.exists() and save.samefile(arguments.model):
        raise CommandError(
            f"--save must name another folder than --model, not {str(save)!r}: the run resumes from the model that it "
            "began with"
        )
    if arguments.trace:
        _check_place("--trace", check_replaceable, arguments.trace)
    if save:
        _check_place("--save", check_writable, next(filter(Path.exists, save.absolute().parents)))


def _check_place(option: str, check: Callable[[Path], None], path: Path) -> None:
    try:
        check(path)
    except OSError as error:
        raise CommandError(
            f"{option} must be a place that can be written, but {str(path)!r} is none: {error.strerror}"
        ) from error


def _add_topk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topk", type=float, metavar="RATIO", help="Send this share of the gradient only.")
    parser.add_argument(
        "--topk-residual", choices=("int4", "fp32", "none"),
        help="How what is not sent is held until the next step: in 4 bits (default), exactly, or not at all.",
    )  # fmt: skip
    parser.add_argument(
        "--topk-values", choices=("bf16", "fp16", "fp32"), help="Number format of what is sent (default: bf16)."
    )
    parser.add_argument(
        "--topk-warmup",
        type=non_negative,
        metavar="STEPS",
        help="Steps in which the share falls from all to RATIO (default: 100).",
    )
    parser.add_argument(
        "--topk-unsaved", action="store_true", default=None,
        help="Keep what is not sent out of the state: nothing of it crosses the link, a resumed run begins without it.",
    )  # fmt: skip


def _compression(arguments: argparse.Namespace) -> "TopK | None":
    from nearflash.training import TopK

    if arguments.topk is None:
        return None
    choices = {name: getattr(arguments, f"topk_{name}") for name in _TOPK_CHOICES}
    given = {name: value for name, value in choices.items() if value is not None}
    residual = given.get("residual", "int4")
    return TopK(
        arguments.topk,
        feedback=residual != "none",
        value_format=given.get("values", "bf16"),
        residual="int4" if residual == "none" else residual,
        warmup_steps=given.get("warmup"),
        saved="unsaved" not in given,
    )


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    devices = arguments.device if len(arguments.device) > 1 else arguments.device * len(arguments.path)
    return {
        "path": arguments.path,
        "device": devices,
        "param_dtype": None if arguments.dtype == "fp32" else arguments.dtype,
        "resume": False if arguments.no_resume else "auto",
        "state_format": arguments.state_format,
        "master": arguments.master,
        "max_grad_norm": arguments.max_grad_norm or None,
        "loss_scale": "dynamic" if arguments.dtype == "fp16" else None,
        "compression": _compression(arguments),
        "overlap": arguments.overlap,
    }


def _print_progress(progress: "TrainingProgress") -> None:
    """A line that is overwritten on a terminal; elsewhere some of them."""
    line = (
        f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  {progress.tokens_per_s:.1f} tokens/s  "
        f"optimizer {progress.optimizer_s:.2f} s  {progress.remaining_s:.0f} s left"
    )
    print_step(line, progress.step, progress.steps, 10)


def _summary(optimizer: "NearStorageOptimizer") -> list[str]:
    """Bytes over each link, and what the last step waited for."""
    report = optimizer.report
    traffic, params = report.traffic, max(report.traffic.params, 1)
    links = {
        "gradients down": traffic.to_device_bytes,
        "parameters up": traffic.from_device_bytes,
        "flash read": traffic.flash_read_bytes,
        "flash written": traffic.flash_written_bytes,
    }
    stalls = ", ".join(f"{name} {100 * share:.0f} %" for name, share in report.stalls.fractions.items())
    return [
        f"{traffic.steps} steps to step {optimizer.steps} of {_files(optimizer)}; {report.skipped_steps} skipped",
        "bytes a parameter and step: "
        + ", ".join(f"{name} {size / params:.2f}" for name, size in links.items())
        + f"; p, m and v over the host link would be {traffic.conventional_bytes / params:.0f}",
        f"the last step waited for: {stalls or 'nothing'}",
    ]


def _files(optimizer: "NearStorageOptimizer") -> str:
    return ", ".join(map(str, optimizer.store.paths))


def _count(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 0.0)
    try:
        count = int(float(text[:-1] if unit else text) * (unit or 1))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a count such as 135M or 7B, not {text!r}")
    return count
