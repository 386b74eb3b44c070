"""Figures measured again: values taken from the rows that a bench printed now.

A line of `figures.jsonl` that says which rows its value comes from has `key`, that of the row, `where`, what the rows
must have, and `take`, one of TAKE for several rows (by default all must have the same value).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.bench.results import FIGURES, machine, read_objects, write_objects

__all__ = ["TAKE", "update_figures"]

#: What a figure is of the values of its rows.
TAKE: dict[str, Callable[[Sequence[float]], float]] = {
    "least": min, "most": max, "sum": sum, "farthest from zero": lambda values: max(values, key=abs),
}  # fmt: skip


def update_figures(
    root: Path, rows: Sequence[Mapping[str, Any]], command: str, rates: str | None = None
) -> list[tuple[str, float, float]]:
    """Give the figures of a command the values of `rows`; name, old value and new value of each.

    rates: what the disk or the memory gave in the same run, for timings. Raises CommandError where no figure of the
    command says where it comes from, where one of them has no row or several values, and where the rows state no
    commit; nothing is written then.
    """
    path = root / FIGURES / "figures.jsonl"
    lines, changes = read_objects(path), []
    beside = {"date": datetime.now(UTC).date().isoformat(), "commit": _commit(rows), "machine": machine(),
              "source": "nearflash results update"}  # fmt: skip
    for line in lines:
        if line["command"] == command and "key" in line:
            before = line["value"]
            line |= {"value": _value(line, rows)} | beside | ({"rates": rates} if rates else {})
            changes.append((str(line["figure"]), before, line["value"]))
    if not changes:
        raise CommandError(f"command must be that of figures in {path} that have a key, not {command!r}")
    write_objects(path, lines)
    return changes


def _commit(rows: Sequence[Mapping[str, Any]]) -> str:
    commits = {str(row.get("git", "")) for row in rows}
    if len(commits) != 1 or not (commit := commits.pop()):
        raise CommandError(f"rows must be of one commit, which they state, not of {sorted(commits) or 'none'}")
    return commit[:8] + "+" * commit.endswith("+")


def _value(figure: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """The figure's value of the rows. Raises CommandError."""
    key, where, take = figure["key"], figure.get("where", {}), figure.get("take")
    found = [row[key] for row in rows if key in row and all(row.get(name) == value for name, value in where.items())]
    if not found or (take is None and len(set(found)) > 1):
        values = ", ".join(map(str, sorted(set(found)))) or "in no row"
        raise CommandError(f"rows must have one value of {figure['figure']!r}, {key} where {where}: it is {values}")
    value = found[0] if take is None else TAKE[take](found)
    return value if isinstance(value, int) else float(f"{value:.4g}")
