"""`nearflash generate`: prompts of a file continued, their KV near storage."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy

if TYPE_CHECKING:
    from nearflash.inference.generate import Generated, Progress

__all__ = ["generate"]


def generate(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    for package in ("torch", "transformers"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser = subparsers.add_parser("generate", help="continue prompts, with the KV cache on flash")
    parser.add_argument("--model", required=True, help="a transformers folder, or smollm2")
    parser.add_argument("--prompts", required=True, type=Path, help="text file, one prompt a line")
    parser.add_argument("--attention", default=AttentionPolicy.mode, choices=[*AttentionMode])
    for name, kind, meaning in (
        ("score_dims", _amount, "of the approximate score: a count or a fraction"),
        ("top_k", _amount, "tokens or KV page groups: a count or a fraction"),
        ("top_p", float, "take entries until this share of probability, up to --top-k"),
        ("local_window", int, "last tokens, always taken"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=getattr(AttentionPolicy, name), help=meaning
        )
    parser.add_argument("--keep-tail", action="store_true", help="take all tokens after the last index block, too")
    parser.add_argument("--min-tokens", type=int, default=256, help="tokens: shorter contexts are attended to in full")
    parser.add_argument("--device", default="host", help="host, or a device such as model:attend-tiny")
    parser.add_argument("--devices", type=int, default=1, help="KV heads over so many of them")
    parser.add_argument("--path", type=Path, help="file for the pages (device cpu); default: one that is deleted")
    parser.add_argument(
        "--memory", type=_size, default=256 << 20, metavar="BYTES",
        help="of host memory for index and KV page groups that were read, as 512M or 2G (device cpu; default 256M)",
    )  # fmt: skip
    parser.add_argument(
        "--nand-block-pages", type=int, default=0, metavar="N",
        help="keep pages on the device's NAND, of N pages a block (768 behind attend-tiny), not in its memory",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=1, help="one computes while another is attended to")
    parser.add_argument(
        "--dtype", default="fp32", choices=("fp32", "fp16", "bf16"), help="of the model's own arithmetic"
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a message to an instructed model")
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from nearflash.inference.engines.setup import open_engine
    from nearflash.inference.generate import generate as continued
    from nearflash.inference.models import kv_shape, load_model

    prompts = _prompts(arguments.prompts)
    policy = AttentionPolicy(
        arguments.attention,
        arguments.score_dims,
        arguments.top_k,
        arguments.top_p,
        arguments.local_window,
        min_tokens=arguments.min_tokens,
        keep_tail=arguments.keep_tail,
    )
    model, tokenizer = load_model(arguments.model, arguments.dtype)
    longest = max(map(len, tokenizer(prompts)["input_ids"])) + _TEMPLATE_TOKENS * arguments.chat
    with open_engine(
        kv_shape(model), policy, tokens=longest + arguments.max_new_tokens, sequences=len(prompts),
        device=arguments.device, devices=arguments.devices, path=arguments.path,
        nand_block_pages=arguments.nand_block_pages, cache_bytes=arguments.memory,
    ) as engine:  # fmt: skip
        done = continued(
            model, tokenizer, prompts, engine, max_new_tokens=arguments.max_new_tokens, chat=arguments.chat,
            mini_batches=arguments.mini_batches, progress=_tell,
        )  # fmt: skip
    for prompt, text in zip(prompts, done.texts, strict=True):
        print(f"{prompt}{' => ' if arguments.chat else ''}{text}\n")
    print(_summary(done), file=sys.stderr)
    return 0


_TEMPLATE_TOKENS = 128
"""Room for what a chat template puts around a prompt."""
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
"""Binary ones, as shifts."""


def _amount(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 512M or 2G, not {text!r}")
    return int(number) << _UNITS[unit]


def _prompts(path: Path) -> list[str]:
    try:
        prompts = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise CommandError(f"prompts must be in a readable file, not {str(path)!r}: {error.strerror}") from error
    if not prompts:
        raise CommandError(f"prompts must be at least one line of {str(path)!r}, not none")
    return prompts


def _tell(progress: "Progress") -> None:
    """A line that is overwritten on a terminal; elsewhere some of them."""
    terminal = sys.stderr.isatty()
    if terminal or progress.step in (1, progress.steps) or progress.step % 16 == 0:
        line = (
            f"token {progress.step}/{progress.steps}  {progress.tokens_per_s:.1f} tokens/s  "
            f"{progress.flash_bytes_per_token / 1e6:.3f} MB of flash a token  {progress.remaining_s:.0f} s left"
        )
        print(f"\r{line:<78}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        if terminal and progress.step == progress.steps:
            print(file=sys.stderr)


def _summary(done: "Generated") -> str:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in done.counters.seconds.items())
    kinds = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in done.counters.flash_bytes.items())
    return (
        f"{sum(map(len, done.tokens))} tokens: prefill {done.prefill_s:.1f} s, decode {done.decode_s:.1f} s, "
        f"{done.tokens_per_s:.1f} tokens/s; engine: {phases}\n"
        f"{done.flash_bytes_per_token / 1e6:.3f} MB of flash a token, in all {kinds or 'none'}"
    )
