"""Figures that are older than the code that they are about.

`pages.toml` names, by a part of the command that measured a figure, the folders and files of that code. A figure is old
where these differ from those of the commit that the figure states: by more than comments, docstrings and the form of
Python, and than what was taken back. Published figures are about no code of ours.
"""

import ast
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.bench.results import read_lines, read_plan

__all__ = ["OldFigures", "find_old_figures", "sources_of"]


@dataclass(frozen=True)
class OldFigures:
    """The figures of one page that a command measured at one commit.

    count: figures and rows. since: commits to files that differ, the newest first; none where the history does not have
    the figures' commit.
    """

    page: str
    command: str
    commit: str
    count: int
    since: tuple[str, ...]

    def __str__(self) -> str:
        if not self.since:
            why = f"no commit {self.commit or 'is stated'} in this history (a shallow clone: git fetch --unshallow)"
        else:
            changes = f"{len(self.since)} commit{'s' * (len(self.since) > 1)}"
            why = f"its code has {changes} since {self.commit}, the newest {self.since[0]:.72}"
        return f"{self.page}: {self.count} of `{self.command}`: {why}"


def sources_of(command: str, sources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Folders and files that a command's figures are about: those of the longest key that is part of it.

    Raises CommandError where no key is.
    """
    keys = [key for key in sources if key in command]
    if not keys:
        raise CommandError(f"sources in pages.toml must have a key for the command {command!r}: add what it measures")
    return tuple(sources[max(keys, key=len)])


def find_old_figures(root: Path) -> list[OldFigures]:
    """Figures of the checkout `root` whose code has changed since, or whose commit is unknown.

    Raises CommandError where `root` is no checkout with a history, or git is missing.
    """
    plan, counts = read_plan(root), Counter(map(_origin, filter(_is_ours, read_lines(root))))
    _git(root, "rev-parse", "HEAD")
    old = []
    for (page, command, commit), count in counts.items():
        sources = sources_of(command, plan["sources"])
        known = commit and _git(root, "rev-parse", "-q", "--verify", f"{commit}^{{commit}}", check=False)
        changed = _find_changes(root, commit, sources) if known else []
        log = _git(root, "log", "--format=%h %as %s", f"{commit}..HEAD", "--", *changed) if changed else ""
        if changed or not known:
            old.append(OldFigures(page, command, commit, count, tuple(log.splitlines())))
    return old


def _find_changes(root: Path, commit: str, sources: Sequence[str]) -> list[str]:
    """Files whose code is not what it was at a commit."""
    names = _git(root, "diff", "--name-only", "--no-renames", commit, "HEAD", "--", *sources).splitlines()
    return [name for name in names if _code_of(root, commit, name) != _code_of(root, "HEAD", name)]


@cache
def _code_of(root: Path, commit: str, name: str) -> str:
    """A file's text, that of Python without comments, docstrings and form; nothing where it was not there."""
    text = _git(root, "show", f"{commit}:{name}", check=False)
    if not name.endswith(".py"):
        return text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        for body in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            body[:] = [entry for entry in body if not _is_text(entry)]
    return ast.dump(tree)


def _is_text(node: Any) -> bool:
    """Whether a statement is a docstring, or one of an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_ours(line: Mapping[str, Any]) -> bool:
    return line.get("level") != "published"


def _origin(line: Mapping[str, Any]) -> tuple[str, str, str]:
    """Page, command and commit of a line; without the mark of a checkout that had changes."""
    commit = line.get("commit") or line.get("row", {}).get("git") or ""
    return line["page"], line["command"], str(commit).rstrip("+")


def _git(root: Path, *arguments: str, check: bool = True) -> str:
    """Run git: what it prints, or nothing where it fails and need not work."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=check)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CommandError(
            "results stale must be run where git is installed, in a clone with its history, as figures state commits, "
            f"and git must order them; in {root}: {said.strip().splitlines()[0]}"
        ) from None
    return done.stdout if done.returncode == 0 else ""
