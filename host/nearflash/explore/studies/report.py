"""One web page that needs no other file: conclusions and figures of papers, sliders, phases, grids, scaling, costs."""

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from nearflash.explore.outcome import Outcome
from nearflash.explore.studies.check import conclusions, figures
from nearflash.explore.studies.clusters import cluster_serving_rows
from nearflash.explore.studies.costs import cost_of
from nearflash.explore.studies.dse import engine_builds, kvnand_choice, kvnand_grid
from nearflash.explore.studies.plots import bars, curves, errors_plot, heat_map, svg
from nearflash.explore.studies.sliders import slider_studies
from nearflash.explore.studies.sweeps import compare_systems, instinfer_rows, smart_infinity_rows
from nearflash.explore.systems.cluster import Cluster
from nearflash.explore.systems.cluster_serving import LAYOUTS
from nearflash.explore.systems.instinfer import Serving
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["report_page", "write_report"]

_MODELS = ("opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b", "mixtral-8x7b")
_CONTEXTS = (128, 1_000, 10_000, 100_000)
_DRIVES = (1, 2, 3, 4, 6, 8, 10)


def report_page() -> str:
    """The page as HTML: conclusions, disagreements, figures; then sliders, pictures and assumptions."""
    rows, found = list(figures()), list(conclusions())
    parts = [
        "<h1>nearflash: models of near-storage systems</h1>",
        _summary(rows, found),
        "<h2>Conclusions of the papers</h2>",
        _conclusions_table(found),
        "<h2>Where ours disagrees</h2>",
        _disagreements(rows, found),
        "<h2>Figures</h2>",
        "<p>Errors are fractions of the published value. Where a figure gave a constant of the hardware tables, the "
        "last column states which: its own error shows nothing.</p>",
        _figures_table(rows),
        _figure("errors", errors_plot(rows)),
        *_sliders(),
    ]
    for title, outcomes in compare_systems().items():
        parts += [f"<h2>{html.escape(title[0].upper() + title[1:])}</h2>", _figure("phases", bars(outcomes, title))]
        parts += [_costs_table(outcomes), _assumptions([(outcome.system, outcome.assumptions) for outcome in outcomes])]
    parts += ["<h2>Scaling</h2>", _figure("drives", _serving_curves()), _figure("training", _training_curves())]
    parts += ["<h2>Clusters</h2>", _clusters(), "<h2>Splits of dies</h2>"]
    for model, quant, dies in (("llama3.1-70b", "w4a16", 8), ("llama3.1-8b", "w16a16", 16)):
        grid = list(kvnand_grid([model], _CONTEXTS, [quant], dies))
        parts.append(_figure("grid", heat_map(grid, f"{model}, {quant}, {dies} dies: ms a token")))
    parts += [_choices(), "<h2>Builds of the attend engine on a Zynq-7045</h2>", _builds()]
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>nearflash explore</title>' \
           '<meta name="viewport" content="width=device-width">' \
           f'<link rel="icon" href="data:,"><style>{_text("report.css")}</style></head><body>\n{body}\n' \
           f'<script type="application/json" id="studies">{_studies()}</script>\n' \
           f'<script>{_text("report.js")}</script></body></html>\n'  # fmt: skip


def _text(name: str) -> str:
    return (files("nearflash.explore.studies") / name).read_text("utf-8")


def _studies() -> str:
    return json.dumps(slider_studies(), separators=(",", ":")).replace("<", "\\u003c")


def _summary(rows: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> str:
    true = sum(row["verdict"] == "true" for row in found)
    within = sum(abs(row["error"]) <= 0.1 for row in rows)
    given, gave = (sum("calibrates" in row for row in each) for each in (found, rows))
    return (
        f"<p>{true} of {len(found)} conclusions of the papers are true of our models; {given} of them decided a term "
        f"or a constant (given), so that their truth shows nothing. {within} of {len(rows)} "
        f"published figures are within 10 %; {gave} of them gave constants. Figures that were held aside are compared "
        "elsewhere and do not count here; <code>docs/known-issues.md</code> states what is known of them.</p>"
    )


def _conclusions_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A short row for each; sources and notes below, closed."""
    lines, notes = [], []
    for row in found:
        values = "; ".join(f"{label}: {value:.4g}" for label, value in row["values"].items())
        kind = "" if row["verdict"] == "true" else ' class="far"'
        verdict = row["verdict"] + (" (given)" if "calibrates" in row else "")
        lines.append((f'{kind} id="{html.escape(row["id"])}"', (row["what"], verdict, f"{values} ({row['unit']})")))
        gave = f"decided: {row['calibrates']}" if "calibrates" in row else ""
        notes.append(("", (row["id"], row["source"], "; ".join(filter(None, (gave, row.get("note", "")))))))
    sources = _table(("conclusion", "source", "note"), notes)
    return f"{_table(('conclusion', 'ours', 'values'), lines)}<details><summary>Sources</summary>{sources}</details>"


def _disagreements(rows: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        ("", (row["what"], "conclusion", row["reason"], row["settle"])) for row in found if row["verdict"] != "true"
    ]
    for row in rows:
        if abs(row["error"]) > 0.1:
            reason, _, settle = row.get("explained", "").partition("; to settle it: ")
            lines.append(("", (row["what"], f"{row['error']:+.0%}", reason, settle)))
    return _table(("what", "size", "reason", "what would settle it"), lines)


def _sliders() -> list[str]:
    titles = {
        "kvnand": "KVNAND: ms a token of every split of the dies",
        "instinfer": "Decode attention in drives: token/s, OPT-13B, 1,024 + 1,024 tokens",
        "training": "Training: seconds of a step",
    }
    parts = ["<h2>Explore</h2><noscript><p>The sliders need scripts; all else is here without.</p></noscript>"]
    return parts + [
        f'<h3>{html.escape(title)}</h3><div class="explorer" id="explore-{name}"></div>'
        for name, title in titles.items()
    ]


def _costs_table(outcomes: Sequence[Outcome]) -> str:
    head = ("system", "seconds", "units/s", "$", "$ a million units", "J a unit", "energy of")
    lines = []
    for found in outcomes:
        cost = cost_of(found)
        line = (found.system, found.seconds, found.rate, cost["usd"], cost["usd_per_million"], cost["joules_per_unit"],
                cost["energy_of"])  # fmt: skip
        lines.append(("", line))
    return _table(head, lines)


def _choices() -> str:
    """From which context which arrangement is the fastest, for every model that 16 dies hold."""
    rows = [row for model in _MODELS for row in kvnand_choice(model, "w4a16", 16)]
    lines = [("", (row["model"], f"{row['from_tokens']:,}", row["arrangement"])) for row in rows]
    return "<h3>The arrangement to take, W4A16, 16 dies</h3>" + _table(("model", "from tokens", "arrangement"), lines)


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


def _clusters() -> str:
    """The cheapest cluster of each layout for 100 users of a model of 70 billion parameters, by context."""
    head = ("prompt_tokens", "layout", "hosts", "drives", "tokens_per_user_second", "first_token_seconds", "usd",
            "usd_per_million", "joules_per_unit")  # fmt: skip
    clusters = [Cluster(hosts, 4, drives) for hosts in (1, 2, 4) for drives in (4, 16)]
    rows = []
    for prompt in (2_000, 8_000, 32_000):
        served = cluster_serving_rows(Serving("llama3.1-70b", prompt, 500, 100), clusters, rate=0.5)
        for layout in LAYOUTS:
            able = [row for row in served if row["layout"] == layout and row["serves"]]
            rows += [{**min(able, key=lambda row: row["usd_per_million"]), "prompt_tokens": prompt}] if able else []
    text = (
        "LLaMA3.1-70B for 100 users, half a token a second each at least: of 1, 2 and 4 hosts of four A100 and 512 GB "
        "with 4 or 16 drives, the cheapest token of each layout that fits; a layout that is missing does not."
    )
    return f"<p>{text}</p>" + _table(head, [("", [row[name] for name in head]) for row in rows])


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
