"""Texts of a file continued, one prompt a line; with torchrun by several ranks, each with a part of the layers."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nearflash.abi.errors import NearflashError
from nearflash.inference.commands.console import read_lines
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.support.arguments import non_negative, positive, rate

__all__ = ["main", "shares"]


def shares(text: str) -> Shares:
    """`gpu=0.5,disk=0.5` as Shares. Raises argparse.ArgumentTypeError."""
    try:
        return Shares(**{name: float(value) for name, value in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"must be shares of gpu, host, disk and device that sum to 1, as gpu=0.5,disk=0.5, not {text!r}"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nearflash.offload", description=__doc__)
    parser.add_argument("model", type=Path, help="Folder of the model.")
    parser.add_argument("--prompts", type=Path, required=True, help="Texts, or JSON lists of tokens, one a line.")
    parser.add_argument("--max-new-tokens", type=positive, help="New tokens of each at most.")
    parser.add_argument("--batch-size", type=positive, default=32, help="Prompts that are computed at once.")
    parser.add_argument("--num-batches", type=positive, default=1, help="Batches for which a layer is loaded once.")
    for what, default in (("weights", "disk=1"), ("cache", "host=1"), ("activations", "gpu=1")):
        parser.add_argument(f"--{what}", type=shares, default=default, help=f"Tiers of the {what}.")
    parser.add_argument("--no-overlap", action="store_true", help="Load and compute one after the other.")
    parser.add_argument("--weight-bits", type=int, choices=(16, 4), default=16, help="Of weights.")
    parser.add_argument("--cache-bits", type=int, choices=(16, 4), default=16, help="Of keys and values.")
    parser.add_argument("--temperature", type=rate, help="Draw tokens; without it as the model's folder states.")
    parser.add_argument("--top-p", type=rate, help="Draw from the likeliest tokens of so much probability.")
    parser.add_argument("--seed", type=non_negative, default=0, help="Of drawn tokens.")
    parser.add_argument("--expert-bytes", type=positive, help="Memory for experts that are read as they are routed.")
    parser.add_argument("--results", type=Path, help="File of JSON lines; a later run goes on from it.")
    parser.add_argument("--trace", type=Path, help="Where to write what ran when, for ui.perfetto.dev.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 after an error. Texts go to standard output as JSON lines, from the first rank alone."""
    options = _parser().parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        _run(options, rank)
    except NearflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace, rank: int) -> None:
    from nearflash.offload.generation import OffloadedModel

    policy = OffloadPolicy(
        options.batch_size, options.num_batches, options.weights, options.cache, options.activations,
        overlap=not options.no_overlap, cpu_attention=True, weight_bits=options.weight_bits,
        cache_bits=options.cache_bits,
    )  # fmt: skip
    with OffloadedModel(options.model, policy, expert_bytes=options.expert_bytes) as model:
        done = model.generate(
            _prompts(options.prompts), max_new_tokens=options.max_new_tokens, temperature=options.temperature,
            top_p=options.top_p, seed=options.seed, results=options.results if rank == 0 else None,
        )  # fmt: skip
        if options.trace is not None:
            name = options.trace if rank == 0 else options.trace.with_stem(f"{options.trace.stem}-{rank}")
            model.ledger.timeline.write(name)
    if rank == 0:
        for number, (tokens, text) in enumerate(zip(done.tokens, done.texts, strict=True)):
            print(json.dumps({"prompt": number, "tokens": tokens, "text": text}))
    report = done.report
    peaks = ", ".join(f"{tier} {size / 1e6:.1f} MB" for tier, size in report.peak_bytes.items())
    print(f"rank {rank}: {report.tokens_per_s:.1f} tokens/s of all prompts in {report.total_s:.1f} s; peaks: {peaks}",
          file=sys.stderr)  # fmt: skip


def _prompts(file: Path) -> list[str] | list[list[int]]:
    """Prompts of a file. Raises CommandError."""
    lines = read_lines(file)
    try:
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return lines
    return rows if all(isinstance(row, list) for row in rows) else lines


if __name__ == "__main__":
    sys.exit(main())
