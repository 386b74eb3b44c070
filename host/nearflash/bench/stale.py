"""Figures that are older than the code that they are about.

`pages.toml` names, by a part of the command that measured a figure, the folders and files of that code. A figure is old
where git has a commit to them after the one that the figure states. Published figures are about no code of ours.
"""

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.bench.results import read_lines, read_plan

__all__ = ["OldFigures", "find_old_figures", "sources_of"]


@dataclass(frozen=True)
class OldFigures:
    """The figures of one page that a command measured at one commit.

    count: figures and rows. since: commits to that code after it, the newest first; none where the history does not
    have the figures' commit.
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
        log = _git(root, "log", "--format=%h %as %s", f"{commit}..HEAD", "--", *sources) if known else ""
        if log or not known:
            old.append(OldFigures(page, command, commit, count, tuple(log.splitlines())))
    return old


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
