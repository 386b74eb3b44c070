"""`nearflash generate`: prompts continued, in memory or by a plan, with K and V near storage or on tiers."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from nearflash.inference.commands.console import read_prompts
from nearflash.offload.commands.options import (
    add_options,
    check_options,
    devices_of,
    plan_by_hand,
    policy_by_hand,
    sampling_options,
)
from nearflash.weights.folder import open_folder

__all__ = ["generate", "token_rows"]

_EXAMPLES = """examples:
  Continue a text, and show it as it comes:
    nearflash generate --model DIR "It was a dark night" --stream
  Answer each line of a file, or what another program writes:
    nearflash generate --model smollm2 --chat --prompts prompts.txt
    echo "Why is the sky blue?" | nearflash generate --model smollm2 --chat
  Talk, and go on with it tomorrow:
    nearflash generate --model smollm2 --chat --session talk.kv "Who was Ada Lovelace?"
    nearflash generate --model smollm2 --chat --session talk.kv "And what did she write?"
  Read the KV page groups that hold 95 % of the attention, at most a quarter of them:
    nearflash generate --model smollm2 --chat --prompts prompts.txt --attention sparf-page --top-p 0.95 --top-k 0.25
  Attend on the simulated gateware, its pages on simulated NAND:
    nearflash generate --model FOLDER --prompts prompts.txt --device verilator --nand-block-pages 768 --max-new-tokens 4
  Weights as the fastest plan places them, K and V on two drives, the page groups that matter read:
    nearflash generate --model DIR --prompts prompts.txt --plan auto --attention sparf-page \\
        --path /mnt/a/kv --path /mnt/b/kv
  Layers by two ranks:
    torchrun --nproc 2 --no-python nearflash generate --model DIR --prompts prompts.txt --weights disk=1
"""


def generate(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is missing."""
    for package in ("torch", "transformers", "accelerate"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        epilog=_EXAMPLES,
        description="Continue a prompt, or every line of a file, with a transformers model: in memory, with K and V\n"
        "on flash, where decode attends to them; or by a plan, which places weights, K and V on tiers.\n"
        "Texts go to standard output, progress and rates to standard error.",
    )
    add_options(parser)
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from nearflash.support.threads import set_threads

    prompts: Sequence[Any] = read_prompts(arguments.prompt, arguments.prompts, sys.stdin)
    if arguments.json:
        prompts = token_rows(prompts) or prompts
    devices = devices_of(arguments)
    attention, sampling = policy_by_hand(arguments), sampling_options(arguments)
    check_options(arguments, prompts, devices)
    in_memory = arguments.plan is None and plan_by_hand(arguments) is None
    # Raises what the model's files or its config do not allow, before the seconds that torch takes to be imported.
    open_folder(arguments.model, adapters=in_memory, quantized=in_memory, gguf=in_memory)
    set_threads(arguments.threads)  # before torch is imported

    from nearflash.offload.commands.runtime import Job, run

    return run(Job(arguments, prompts, devices, sampling, attention))


def token_rows(texts: Sequence[str]) -> list[list[int]] | None:
    """Lists of tokens, where all texts are such in JSON."""
    try:
        rows = [json.loads(text) for text in texts]
    except (ValueError, RecursionError):
        return None
    return rows if all(isinstance(row, list) for row in rows) else None
