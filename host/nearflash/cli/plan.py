"""`nearflash plan` and `nearflash tune`: how a model would generate here, before anything is loaded."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.support.arguments import Ineffective, above_zero, declare_ineffective, positive
from nearflash.support.files import check_replaceable

__all__ = ["plan", "tune"]

_EXAMPLES = """examples:
  nearflash plan DIR --prompt-len 512 --gen-len 32
  nearflash plan DIR --hardware t4 --prompts 256 --bits 4 --picture plan.png
  nearflash plan opt-175b/config.json --hardware machine.toml --json -o plan.json
  nearflash plan DIR --ranks 2 -o plan.json
Then: nearflash generate --model DIR --prompts FILE --plan plan.json
"""
_TUNE_EXAMPLES = """examples:
  nearflash tune DIR --prompt-len 512 --gen-len 32
Then: nearflash generate --model DIR --prompts FILE --plan auto
"""
_MEASURE = "measure"
_MOST = 1e12


def plan(subparsers: Any) -> None:
    """Add `plan`. Raises ImportError, loading nothing, where a package that it needs is not installed."""
    text = (
        "Find the fastest way to generate that fits a machine: how fast, how many bytes, how much wear.\n"
        "Nothing of the model is loaded but its config and its files' headers."
    )
    parser = _parser(subparsers, "plan", text, _EXAMPLES)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="Keep the plan in this file.")
    parser.add_argument("--picture", type=Path, metavar="FILE",
                        help="Draw where every byte lies and one step of decode into this PNG.")  # fmt: skip
    parser.add_argument("--curve", type=Path, metavar="FILE",
                        help="Find the best plan for 1, 2, 4, … prompts at once, too, and draw their latency and "
                        "throughput into this PNG.")  # fmt: skip
    parser.set_defaults(run=_plan)


def tune(subparsers: Any) -> None:
    """Add `tune`. Raises ImportError as `plan` does."""
    text = "Measure this machine, find the plan for a model and keep it beside it."
    parser = _parser(subparsers, "tune", text, _TUNE_EXAMPLES)
    parser.set_defaults(run=_tune)


def _parser(subparsers: Any, name: str, description: str, examples: str) -> argparse.ArgumentParser:
    if not find_spec("scipy"):
        raise ModuleNotFoundError("no scipy", name="scipy")
    parser: argparse.ArgumentParser = subparsers.add_parser(name, description=description, epilog=examples)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="A folder with config.json, a config.json itself, or smollm2.")
    add("--prompt-len", type=positive, default=512, metavar="N", help="Tokens of a prompt (default: %(default)s).")
    add("--gen-len", type=positive, default=32, metavar="N", help="Tokens generated for each (default: %(default)s).")
    add("--prompts", type=positive, default=256, metavar="N",
        help="Generate for so many prompts at once at most (default: %(default)s).")  # fmt: skip
    add("--hardware", metavar="NAME",
        help="A machine's profile: a TOML file, the name of one that comes along, or measure, which measures this "
        "machine again (default: as it was measured, or measured now).")  # fmt: skip
    add("--folder", type=Path, default=Path(), metavar="DIR", help="Measure the drive of this folder.")
    add("--gpu-memory", type=_gigabytes, metavar="GB",
        help="Fill so much of the GPU's memory at most; without a GPU, of one memory with --host-memory.")  # fmt: skip
    add("--host-memory", type=_gigabytes, metavar="GB", help="Fill so much of the host's memory at most.")
    add("--disk", type=_gigabytes, metavar="GB", help="Fill so much of the disk at most.")
    add("--bits", type=int, nargs="+", choices=(16, 4), default=[16], metavar="BITS",
        help="Try weights of 16 or 4 bits (default: 16).")  # fmt: skip
    add("--cache-bits", type=int, nargs="+", choices=(16, 4), default=[16], metavar="BITS",
        help="Try a KV cache of 16 or 4 bits (default: 16).")  # fmt: skip
    add("--ranks", type=positive, default=1, metavar="N",
        help="Plan for a pipeline of N processes, each of which has a part of the layers and a machine, or a part of "
        "one, like the profile's (default: %(default)s).")  # fmt: skip
    add("--max-seconds", type=_seconds, metavar="S", help="Finish all prompts of a block in this time.")
    add("--json", action="store_true", help="Print one JSON object.")
    rule = "left out with a machine's profile (--hardware), as nothing is measured"
    declare_ineffective(parser, Ineffective(("folder",), lambda given: given.hardware not in (None, _MEASURE), rule))
    return parser


def _gigabytes(text: str) -> float:
    return above_zero(text, _MOST) * 1e9


def _seconds(text: str) -> float:
    return above_zero(text, _MOST)


def _plan(arguments: argparse.Namespace) -> int:
    _check_outputs({name: getattr(arguments, name) for name in ("output", "picture", "curve")})
    if arguments.picture is not None and arguments.ranks > 1:
        raise CommandError("picture must be left out with ranks: it draws one process's memory and time")
    sought = _sought(arguments)
    plan = _search(sought)
    if arguments.output:
        _keep(plan, arguments.output)
    if arguments.picture:
        from nearflash.planning.picture import save_picture

        save_picture(plan, arguments.picture)
        print(f"drawn in {arguments.picture}", file=sys.stderr)
    points = None if arguments.curve is None else _curve(sought, arguments.curve)
    return _print(arguments, plan, points)


def _check_outputs(files: dict[str, Path | None]) -> None:
    """Raise CommandError for a file that two options name, and what `check_replaceable` raises."""
    seen: dict[Path, str] = {}
    for name, file in files.items():
        if file is None:
            continue
        check_replaceable(file)
        if (other := seen.setdefault(file.resolve(), name)) != name:
            raise CommandError(f"{name} must be another file than {other}, not {str(file)!r}, too")


def _tune(arguments: argparse.Namespace) -> int:
    from nearflash.planning.plan_file import PLAN_NAME

    if not arguments.model.is_dir():
        raise CommandError(f"model must be a folder to keep a plan in, not {str(arguments.model)!r}")
    check_replaceable(arguments.model / PLAN_NAME)
    plan = _search(_sought(arguments))
    _keep(plan, arguments.model / PLAN_NAME)
    return _print(arguments, plan)


def _keep(found: Any, file: Path) -> None:
    from nearflash.planning.plan_file import write_plan

    write_plan(found, file)
    print(f"kept in {file}", file=sys.stderr)


def _curve(sought: Any, file: Path) -> list[dict[str, Any]]:
    """Draw the plans of one prompt and more; their points."""
    from nearflash.planning.curve import curve_points, plan_curve
    from nearflash.planning.picture import save_curve

    plans = list(plan_curve(*sought))
    save_curve(plans, file)
    print(f"drawn in {file}", file=sys.stderr)
    return curve_points(plans)


def _print(arguments: argparse.Namespace, found: Any, points: list[dict[str, Any]] | None = None) -> int:
    from nearflash.planning.explain import explain, summary
    from nearflash.planning.plan_file import plan_text

    if arguments.json:
        curve = {} if points is None else {"curve": points}
        print(json.dumps({**summary(found), "policy": json.loads(plan_text(found))["policy"], **curve}))
    else:
        print("\n".join(explain(found)))
        for point in points or ():
            print(f"{point['sequences']:>6} at once  {point['tokens_per_second']:>9.3g} token/s  "
                  f"{point['seconds']:>9.3g} s for all tokens  {point['seconds_a_step']:>9.3g} s a step")  # fmt: skip
    return 0


def _search(sought: Any) -> Any:
    from nearflash.planning.pipeline import search_pipeline

    return search_pipeline(*sought)


def _sought(arguments: argparse.Namespace) -> Any:
    """Shape, machine, workload, space and ranks of what is searched."""
    from nearflash.offload.machine.plan import crossing_fraction, machine_here, model_shape
    from nearflash.planning.profile import load_machine
    from nearflash.planning.search import Space, Workload
    from nearflash.support.threads import set_threads

    if arguments.hardware in (None, _MEASURE):
        set_threads()  # before torch is imported: what is measured computes as nearflash generate will
    shape, stored_fraction = model_shape(arguments.model)
    if arguments.hardware in (None, _MEASURE):
        again = arguments.hardware == _MEASURE
        machine, kept = machine_here(arguments.model, shape, arguments.folder, stored_fraction, again=again)
        if kept is not None:
            print(f"measured, and kept in {kept}", file=sys.stderr)
    else:
        machine = load_machine(arguments.hardware)
    budgets = {"gpu_bytes": arguments.gpu_memory, "host_bytes": arguments.host_memory, "disk_bytes": arguments.disk}
    machine = machine.with_memory(**{tier: budget for tier, budget in budgets.items() if budget is not None})
    space = Space(weight_bits=arguments.bits, cache_bits=arguments.cache_bits, max_seconds=arguments.max_seconds,
                  max_sequences=arguments.prompts, stored_fraction=stored_fraction,
                  crossing_fraction=crossing_fraction(arguments.model))  # fmt: skip
    return shape, machine, Workload(arguments.prompt_len, arguments.gen_len), space, arguments.ranks
