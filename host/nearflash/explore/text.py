"""Rows as a table of plain text."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["text_table"]


def text_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Columns side by side, numbers at the right; without columns, all whose values are single."""
    if not rows:
        return "no rows"
    names = list(columns) or [key for key, value in rows[0].items() if not isinstance(value, dict | list | tuple)]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    right = [
        all(isinstance(row.get(name), int | float | None) and row.get(name) is not True for row in rows)
        for name in names
    ]
    lines = [names, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(cell.rjust(width) if at_right else cell.ljust(width)
                  for cell, width, at_right in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )  # fmt: skip


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
