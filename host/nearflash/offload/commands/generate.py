"""`nearflash generate --plan`: prompts continued by a model that memory does not hold, as a plan places it.

Without --plan the command is that of nearflash.inference.commands.chat.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError
from nearflash.inference.commands.chat import generate as in_memory
from nearflash.inference.commands.chat import sampling_options
from nearflash.inference.commands.console import read_prompts
from nearflash.support.arguments import above_zero
from nearflash.weights.folder import open_folder

if TYPE_CHECKING:
    from nearflash.inference.settings import GenerationSettings
    from nearflash.planning.plan_file import PlanFile

__all__ = ["AUTO", "generate"]

AUTO = "auto"
_OWN = ("gpu_memory", "host_memory", "disk", "scratch", "results", "trace", "expert_memory")
"""Options that go with --plan alone."""
_OTHERS = ("policy", "attention", "session", "path", "stream")
"""Options that do not go with it."""


def generate(subparsers: Any) -> None:
    """Add the command. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    parser = in_memory(subparsers)
    add = parser.add_argument_group("offloading: models and KV caches that are larger than memory").add_argument
    add("--plan", metavar="FILE",
        help="Place weights, KV cache and activations as this plan does (nearflash plan -o FILE); auto: as the plan "
        "beside the model (nearflash tune), else as the fastest that fits this machine.")  # fmt: skip
    for tier, what in (("gpu-memory", "the GPU's memory, or without one, of what computes"), ("host-memory", "memory"),
                       ("disk", "the disk")):  # fmt: skip
        add(f"--{tier}", type=_gigabytes, metavar="GB", help=f"Fill so much of {what} at most (with --plan auto).")
    add("--scratch", type=Path, metavar="DIR", help="Keep the KV cache that lies on disk here (default: the system's "
        "folder for temporary files).")  # fmt: skip
    add("--results", type=Path, metavar="FILE",
        help="Write finished texts to this file of JSON lines, and go on from it after an interruption.")  # fmt: skip
    add("--trace", type=Path, metavar="FILE", help="Write what ran when, and what was predicted, for ui.perfetto.dev.")
    add("--expert-memory", type=_gigabytes, metavar="GB",
        help="Keep so much of a mixture's experts in memory, and read the others as they are routed.")  # fmt: skip
    parser.set_defaults(run=_generate, run_in_memory=parser.get_default("run"))


def _gigabytes(text: str) -> float:
    return above_zero(text, 1e6, "number of gigabytes") * 1e9


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.plan is None:
        if given := [name for name in _OWN if getattr(arguments, name) is not None]:
            raise CommandError(f"{', '.join(given)} must be given with --plan FILE, or --plan auto")
        run: Callable[[argparse.Namespace], int] = arguments.run_in_memory
        return run(arguments)
    if given := [name for name in _OTHERS if getattr(arguments, name)]:
        raise CommandError(f"{', '.join(given)} must be left out with --plan, which says where everything lies")
    if arguments.device not in ("cpu", "cuda"):
        raise CommandError(f"device must be cpu or cuda with --plan, not {arguments.device!r}")
    open_folder(arguments.model)  # raises what its files or its config do not allow, before prompts are read
    return _generate_by_plan(arguments, read_prompts(arguments.prompt, arguments.prompts, sys.stdin))


def _generate_by_plan(arguments: argparse.Namespace, prompts: list[str]) -> int:
    from nearflash.support.threads import set_threads

    set_threads(arguments.threads)  # before torch is imported

    from nearflash.offload.generation import OffloadedModel
    from nearflash.planning.spans import predict_spans
    from nearflash.weights.pretrained import load_tokenizer, silent_transformers

    with nullcontext() if arguments.verbose else silent_transformers():
        tokenizer = load_tokenizer(arguments.model, verbose=arguments.verbose)
        options = sampling_options(arguments)
        rows, settings = _settings(arguments, tokenizer, prompts, options)
        plan, line = _plan(arguments, max(map(len, rows)), settings.max_new_tokens, len(prompts))
        print(line, file=sys.stderr)
        experts = None if arguments.expert_memory is None else int(arguments.expert_memory)
        with OffloadedModel(
            arguments.model, plan.policy, device=arguments.device, scratch=arguments.scratch, expert_bytes=experts
        ) as model:
            done = model.generate(
                rows, max_new_tokens=settings.max_new_tokens, seed=arguments.seed, results=arguments.results,
                progress=_progress, **options,
            )  # fmt: skip
            if arguments.trace is not None:
                model.ledger.timeline.write(arguments.trace, predict_spans(plan, len(prompts)))
    for prompt, text in zip(prompts, done.texts, strict=True):
        print(f"{prompt}{' => ' if arguments.chat else ''}{text}\n")
    for line in _figures(done, plan.prediction["tokens_per_second"]):
        print(line, file=sys.stderr)
    return 0


def _settings(
    arguments: argparse.Namespace, tokenizer: Any, prompts: list[str], options: dict[str, Any]
) -> tuple[list[list[int]], "GenerationSettings"]:
    """Prompts' tokens and the settings of their generation, checked before anything is planned or loaded."""
    from nearflash.inference.prompts import encode_text, position_limit, prompt_rows
    from nearflash.inference.settings import Caller, generation_settings
    from nearflash.weights.empty import generation_config_of, load_config

    folder = open_folder(arguments.model)
    config = load_config(folder)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    rows = prompt_rows(prompts, partial(encode_text, tokenizer, chat=arguments.chat), vocabulary)
    length = {} if arguments.max_new_tokens is None else {"max_new_tokens": arguments.max_new_tokens}
    return rows, generation_settings(
        generation_config_of(folder.path), Caller.PLAN, list(map(len, rows)), vocabulary=vocabulary,
        positions=position_limit(config), options=options | length,
    )  # fmt: skip


def _plan(arguments: argparse.Namespace, prompt_tokens: int, new_tokens: int, sequences: int) -> tuple["PlanFile", str]:
    """The plan, as a file holds it, and a line about it. Raises PlanError."""
    from nearflash.offload.machine.plan import model_shape, plan_here
    from nearflash.planning.explain import one_line
    from nearflash.planning.plan_file import PLAN_NAME, PlanFile, read_plan
    from nearflash.planning.search import Workload

    model = Path(arguments.model)
    memory = {
        f"{name}_bytes": value
        for name, value in (("gpu", arguments.gpu_memory), ("host", arguments.host_memory), ("disk", arguments.disk))
        if value is not None
    }
    kept = model / PLAN_NAME
    if arguments.plan == AUTO and (memory or not kept.is_file()):
        workload = Workload(prompt_tokens, new_tokens)
        plan = plan_here(model, workload, sequences, arguments.scratch or Path(), memory)
        return PlanFile.of(plan), one_line(plan)
    if memory:
        names = ", ".join(name.removesuffix("_bytes") for name in memory)
        raise CommandError(f"{names} must be given with --plan auto: the plan in {arguments.plan} was made for its own")
    file = kept if arguments.plan == AUTO else Path(arguments.plan)
    plan_file = read_plan(file)
    plan_file.check(*model_shape(model))
    predicted = plan_file.prediction["tokens_per_second"]
    return plan_file, f"plan: {file}, {predicted:.3g} token/s predicted on {plan_file.machine}"


def _progress(done: Any) -> None:
    text = (
        f"\r{done.finished} of {done.prompts} texts, token {done.step} of {done.steps}  "
        f"{done.tokens_per_s:.3g} token/s  {done.remaining_s:.0f} s left "
    )
    print(text, end="", file=sys.stderr, flush=True)


def _figures(done: Any, predicted: float) -> list[str]:
    """Lines after the run."""
    report = done.report
    if not report.new_tokens:
        return [f"\nall {done.resumed} texts were in the results already"]
    parts = ", ".join(f"{name} {spent:.2f} s" for name, spent in report.seconds.items() if spent >= 0.005)
    moved = ", ".join(f"{link} {size / 1e6:,.1f} MB" for link, size in report.link_bytes.items() if size)
    held = ", ".join(f"{tier} {size / 1e6:,.1f} MB" for tier, size in report.peak_bytes.items() if size)
    lines = [
        f"\n{report.new_tokens} tokens in {report.total_s:.2f} s: {report.tokens_per_s:.3g} token/s, "
        f"{predicted:.3g} predicted",
        f"seconds: {parts}",
        f"moved: {moved or 'nothing'}",
        f"at most in use: {held}; the process {report.peak_process_bytes / 1e6:,.0f} MB",
    ]
    if report.expert_hits or report.expert_misses:
        lines.append(f"experts: {report.expert_hit_rate:.2f} of those routed were in memory")
    return lines
