"""The papers' conclusions and figures beside ours, and predictions to rows whose published values are kept elsewhere.

conclusions.toml has each conclusion as a relation of measures, published.toml each figure with its source;
questions.toml has what the texts of other rows mean. The systems and the hardware tables know none of them.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError, NearflashError
from nearflash.explore.studies.measures import measure
from nearflash.support.files import read_text

__all__ = ["SECTIONS", "conclusions", "figures", "predictions"]

SECTIONS = ("endor", "instinfer", "smart_infinity", "kvnand")
_FLAT = 0.05
_LAYERS = re.compile(r"(\d+)/(\d+)/(\d+)")


def _data(name: str) -> dict[str, Any]:
    return tomllib.loads((files("nearflash.explore") / name).read_text("utf-8"))


def conclusions() -> Iterator[dict[str, Any]]:
    """A row for each conclusion of a paper: id, what, verdict ("true" or "disagrees"), our values by label, source.

    A row that disagrees has `reason` and `settle`, what would decide it; `calibrates`: what of the models it decided,
    so that its truth shows nothing.
    """
    for row in _data("conclusions.toml")["conclusions"]:
        values = {label: measure(each["measure"], each["parameters"]) for label, each in row["values"].items()}
        found = {"id": row["id"], "kind": "conclusion", "system": row["system"], "what": row["what"],
                 "verdict": "true" if _holds(row, list(values.values())) else "disagrees", "values": values,
                 "unit": row["unit"], "source": row["source"]}  # fmt: skip
        reasons = {"reason": row.get("disagrees", ""), "settle": row.get("settle", "")}
        yield (
            found
            | (reasons if found["verdict"] == "disagrees" else {})
            | {key: row[key] for key in ("calibrates", "note") if key in row}
        )


def _holds(row: Mapping[str, Any], values: list[float]) -> bool:
    """Whether the values stand to one another as the relation states, and within the row's limits."""
    relations = {
        "rises": all(after > before for before, after in pairwise(values)),
        "flat": max(values) <= (1 + _FLAT) * min(values),
        "crosses one": values[0] < 1 <= values[-1],
        "between": True,
    }
    within = all(row.get("low", -math.inf) <= value <= row.get("high", math.inf) for value in values)
    return relations[row["relation"]] and within


def figures() -> Iterator[dict[str, Any]]:
    """A row for each published figure: id, value, unit, published, error (a fraction of published), source."""
    for row in _data("published.toml")["figures"]:
        value = measure(row["measure"], row["parameters"])
        figure = {"id": row["id"], "kind": "figure", "system": row["system"], "what": row["what"], "value": value,
                  "unit": row["unit"], "published": row["published"], "error": value / row["published"] - 1,
                  "error_of": "published", "source": row["source"]}  # fmt: skip
        yield figure | {key: row[key] for key in ("calibrates", "explained") if key in row}


def predictions(file: Path) -> Iterator[dict[str, Any]]:
    """A row for each row of the sections that we know: id, value, unit. Raises CommandError before the first one."""
    try:
        data = tomllib.loads(read_text(file))
        rows = [(section, row) for section in SECTIONS for row in data.get(section, {}).get("rows", [])]
        asked = [(row["id"], *_question(section, row)) for section, row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CommandError):
            raise
        raise CommandError(
            f"blind must be a TOML file with rows in {', '.join(SECTIONS)}, not {file}: {error}"
        ) from error
    if not asked:
        raise CommandError(f"blind must have rows in one of {', '.join(SECTIONS)}; {file} has none")
    for name, what, parameters, unit, note in asked:
        try:
            value = measure(what, parameters)
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            if isinstance(error, NearflashError):
                raise
            raise CommandError(f"row {name!r:.80} of {file} must be what {what} takes: {error!r:.200}") from error
        answer = {"id": name, "value": value, "unit": unit}
        yield answer | ({"note": note} if note else {})


def _question(section: str, row: Mapping[str, Any]) -> tuple[str, dict[str, Any], str, str]:
    """Measure, parameters, unit and a note."""
    if section == "endor":
        return _endor(row)
    if "method" in row:
        return "speed_up", {"drives" if key == "csds" else key: row[key] for key in row.keys() - {"id"}}, "ratio", ""
    for question in _data("questions.toml")["questions"]:
        if question["text"] == row["value"]:
            details = {key: row[key] for key in row.keys() - {"id", "value"}}
            return question["measure"], question["parameters"] | details, question["unit"], question.get("note", "")
    raise CommandError(f"value of {row['id']} must be a text of questions.toml, not {row['value']!r}")


def _endor(row: Mapping[str, Any]) -> tuple[str, dict[str, Any], str, str]:
    layers = {row["one_layer"]: 1} if "one_layer" in row else row["layers"]
    parameters = {
        "model": row["model"],
        "layers": layers,
        "format": row["format"],
        "direct": row.get("direct_ssd_gpu", False),
    }
    if row["value"] == "seconds":
        return "pass_seconds", parameters, "s", ""
    if row["value"] == "speed-up over dense layer":
        return "pass_speed_up", parameters | {"over": layers}, "ratio", ""
    match = _LAYERS.search(row["value"])
    if not match:
        raise CommandError(
            f"value of {row['id']} must be seconds or a speed-up over dense layers, not {row['value']!r}"
        )
    over = dict(zip(("gpu", "cpu", "ssd"), map(int, match.groups()), strict=True))
    return "pass_speed_up", parameters | {"over": over}, "ratio", ""
