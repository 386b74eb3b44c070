"""One web page without scripts or other files: figures against the papers', phases, grids and scaling."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearflash.explore.studies.check import figures
from nearflash.explore.studies.dse import engine_builds, kvnand_grid
from nearflash.explore.studies.plots import bars, curves, errors_plot, heat_map, svg
from nearflash.explore.studies.sweeps import compare_systems, instinfer_rows, smart_infinity_rows
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["report_page", "write_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 8px; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.far td { background: #fbe9e7; }
svg { max-width: 100%; height: auto; }
figure { margin: 1.5rem 0; }
"""
_CONTEXTS = (128, 1_000, 10_000, 100_000)
_DRIVES = (1, 2, 3, 4, 6, 8, 10)


def report_page() -> str:
    """The page as HTML."""
    rows = list(figures())
    within = sum(abs(row["error"]) <= 0.1 for row in rows)
    parts = [
        "<h1>nearflash: models of near-storage systems</h1>",
        f"<p>Ours against what papers publish: {within} of {len(rows)} figures within 10 % of the published value. "
        "Errors are fractions of the published value. Where a figure gave a constant of the hardware tables, the last "
        "column states which: its own error shows nothing.</p>",
        _figure("errors", errors_plot(rows)),
        _figures_table(rows),
    ]
    for title, outcomes in compare_systems().items():
        parts += [f"<h2>{html.escape(title[0].upper() + title[1:])}</h2>", _figure("phases", bars(outcomes, title))]
        parts.append(_assumptions([(outcome.system, outcome.assumptions) for outcome in outcomes]))
    parts += ["<h2>Scaling</h2>", _figure("drives", _serving_curves()), _figure("training", _training_curves())]
    parts.append("<h2>Splits of dies</h2>")
    for model, quant, dies in (("llama3.1-70b", "w4a16", 8), ("llama3.1-8b", "w16a16", 16)):
        grid = list(kvnand_grid([model], _CONTEXTS, [quant], dies))
        parts.append(_figure("grid", heat_map(grid, f"{model}, {quant}, {dies} dies: ms a token")))
    parts += ["<h2>Builds of the attend engine on a Zynq-7045</h2>", _builds()]
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>nearflash explore</title>' \
           f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'  # fmt: skip


def write_report(path: Path) -> None:
    """The page into a file."""
    write_durably(path, report_page(), mode=PUBLIC_MODE)


def _figure(name: str, picture: Any) -> str:
    return f'<figure class="{name}">{svg(picture)}</figure>'


def _table(head: Sequence[str], lines: Sequence[tuple[str, Sequence[object]]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr{kind}>{''.join(map(_cell, line))}</tr>" for kind, line in lines)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f'<td class="number">{value:.4g}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def _figures_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        note = row.get("explained") or (f"gave: {row['calibrates']}" if "calibrates" in row else "")
        kind = ' class="far"' if abs(row["error"]) > 0.1 else ""
        line = (row["id"], row["what"], row["value"], float(row["published"]), row["unit"], f"{row['error']:+.1%}",
                row["source"], note)  # fmt: skip
        lines.append((f'{kind} id="{html.escape(row["id"])}"', line))
    return _table(("id", "figure", "ours", "published", "unit", "error", "source", "note"), lines)


def _assumptions(given: Sequence[tuple[str, Sequence[str]]]) -> str:
    by_text: dict[str, list[str]] = {}
    for system, texts in given:
        for text in texts:
            by_text.setdefault(text, []).append(system)
    items = "".join(
        f"<li>{html.escape(text)} <small>({html.escape('; '.join(systems))})</small></li>"
        for text, systems in by_text.items()
    )
    return f"<p>Assumptions:</p><ul>{items}</ul>"


def _serving_curves() -> Any:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in instinfer_rows([256], [1, 2, 4, 8, 10, 20]):
        x, y = series.setdefault(row["system"].partition(",")[0], ([], []))
        x.append(row["drives"])
        y.append(row["units_per_second"])
    return curves(series, "OPT-13B, batch 256, 1,024 + 1,024 tokens", "drives", "token/s in decode")


def _training_curves() -> Any:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in smart_infinity_rows(["gpt2-8.4b"], _DRIVES):
        x, y = series.setdefault(row["method"], ([], []))
        x.append(row["drives"])
        y.append(row["speed_up"])
    return curves(series, "GPT-2 8.4B, A5000", "drives", "speed-up over ZeRO-Infinity, as many drives")


def _builds() -> str:
    head = (
        "drive",
        "mode",
        "channels",
        "heads_per_beat",
        "contexts",
        "clock_hz",
        "heads_per_second",
        "lut",
        "dsp",
        "bram36",
    )
    builds = [row for row in engine_builds() if row["fits"]]
    best = {(row["drive"], row["mode"]): row for row in reversed(builds)}
    rows = sorted(best.values(), key=lambda row: -float(str(row["heads_per_second"])))
    return _table(head, [("", [row[name] for name in head]) for row in rows])
