"""Pictures by matplotlib: heat maps of a grid, bars of phases, curves of scaling, errors against the papers.

matplotlib is loaded when the first picture is made. Raises CommandError where it is not installed.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.explore.outcome import Outcome
from nearflash.support.files import PUBLIC_MODE, replace_file

__all__ = ["bars", "curves", "errors_plot", "heat_map", "save", "svg"]


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError("pictures need the package 'matplotlib'; pip install 'nearflash[plan]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """A PNG, or what the name's ending states. Raises CommandError for an ending that is no picture's."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise CommandError(f"picture must end with .png, .svg or .pdf, not {path.name!r}")
    with replace_file(path, mode=PUBLIC_MODE) as out:
        figure.savefig(out, format=path.suffix[1:], dpi=144)


def svg(figure: Any) -> str:
    """The picture as an element of a web page, the same bytes every time."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "nearflash", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def heat_map(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Milliseconds a token by arrangement and context; empty where it does not fit, the best of a context framed."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    names = list(dict.fromkeys(row["arrangement"] for row in rows))
    seconds = {(row["arrangement"], row["context"]): row["seconds"] for row in rows}
    grid = [[_milliseconds(seconds.get((name, context))) for context in contexts] for name in names]
    figure = _figure(1.6 + 0.85 * len(contexts), 1.4 + 0.3 * len(names))
    axes = figure.subplots()
    image = axes.imshow(grid, aspect="auto", cmap="viridis_r", norm="log")
    for column in range(len(contexts)):
        values = [line[column] for line in grid]
        least = min((value for value in values if value == value), default=None)
        for at, value in enumerate(values):
            if value == value:
                axes.text(column, at, f"{value:.3g}", ha="center", va="center", fontsize=7, color="white",
                          fontweight="bold" if value == least else "normal")  # fmt: skip
            if value == least:
                axes.add_patch(_frame(column, at))
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("context, tokens (empty: does not fit; framed: fastest)")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="ms a token")
    return figure


def _milliseconds(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds * 1e3


def _frame(column: int, line: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, line - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2)


def bars(outcomes: Sequence[Outcome], title: str) -> Any:
    """A bar for each system, its phases stacked."""
    names = list(dict.fromkeys(name for outcome in outcomes for name, seconds in outcome.phases.items() if seconds))
    figure = _figure(8, 1.2 + 0.42 * len(outcomes))
    axes = figure.subplots()
    left = [0.0] * len(outcomes)
    for name in names:
        parts = [outcome.phases.get(name, 0.0) for outcome in outcomes]
        axes.barh(range(len(outcomes)), parts, left=left, label=name)
        left = [before + part for before, part in zip(left, parts, strict=True)]
    for at, total in enumerate(left):
        axes.text(total, at, f" {total:.3g} s", va="center", fontsize=8)
    axes.set_yticks(range(len(outcomes)), [outcome.system for outcome in outcomes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left))
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, across: str, up: str) -> Any:
    """A line for each series of x and y."""
    figure = _figure(7, 3.8)
    axes = figure.subplots()
    for name, (x, y) in series.items():
        axes.plot(x, y, marker="o", markersize=3, label=name)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def errors_plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Ours less published, as a percentage of published, for each figure; a tenth each way is shaded."""
    figure = _figure(8, 0.9 + 0.23 * len(rows))
    axes = figure.subplots()
    axes.axvspan(-10, 10, alpha=0.12, color="green")
    axes.barh(range(len(rows)), [100 * row["error"] for row in rows])
    axes.set_yticks(range(len(rows)), [row["id"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("(ours - published) / published, %")
    axes.grid(axis="x", alpha=0.3)
    return figure
