"""The bench `plan`: the cost model against what was published of offloaded generation on one T4.

All rows come from one machine profile. The rows that served to fit it have `published` and `error`, the deviation as a
fraction of the published value; with a file of other configurations, theirs are predicted and nothing is compared.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_args

from nearflash.abi.errors import CommandError
from nearflash.bench.options import Option
from nearflash.planning.cost import FORMS, Form, Prediction, predict
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine
from nearflash.planning.shapes import ModelShape, from_config
from nearflash.planning.terms import Workload

__all__ = ["run"]

_MACHINE = "t4"
_NEW_TOKENS = 32
_REQUIRED = {"id": str, "model": str, "prompt": int, "gbs": int, "batches": int, "percent": list}
_OPTIONAL = {"overlap": bool, "decode_only": bool, "published": dict}


def run(
    blind: Annotated[Path | None, Option("Predict the rows of the section flexgen of this TOML file.", Path,
                                         metavar="FILE")] = None,
    form: Annotated[Form, Option("Overlap as the paper, the released code or we have it.",
                                 choices=get_args(Form))] = FORMS[0],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each published figure, or for each row of the file. Raises CommandError for a file without them."""
    data = tomllib.loads((files("nearflash.bench.offload") / "published.toml").read_text("utf-8"))
    shapes = _Shapes(data["models"])
    if blind is not None:
        for row in _blind_rows(blind):
            prediction = _predict_row(row, shapes, form)
            decode_only = row.get("decode_only", False)
            value = prediction.decode_tokens_per_second if decode_only else prediction.tokens_per_second
            yield {"id": row["id"], "value": value, "unit": "token/s", "form": form}
        return
    for row in data["rows"]:
        prediction = _predict_row(row, shapes, form)
        values = _values(prediction)
        for name, published in row["published"].items():
            unit = "token/s" if name == "tokens_per_second" else "s"
            yield {"id": f"{row['id']} {name}", "value": values[name], "unit": unit, "published": published,
                   "error": values[name] / published - 1, "error_of": "published", "form": form}  # fmt: skip


class _Shapes:
    """Shapes of the published models, by name."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models, self._common = models["shapes"], models["common"]

    def __getitem__(self, name: str) -> ModelShape:
        if name not in self._models:
            raise CommandError(f"model must be one of {', '.join(self._models)}, not {name!r}")
        sizes = self._models[name]
        hidden = sizes["hidden_size"]
        return from_config({**self._common, **sizes, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden})


def _predict_row(row: Mapping[str, Any], shapes: _Shapes, form: Form) -> Prediction:
    weights, cache, states = (_shares(row["percent"], at) for at in (0, 2, 4))
    policy = OffloadPolicy(
        row["gbs"],
        row["batches"],
        weights,
        cache,
        states,
        overlap=row.get("overlap", True),
        cpu_attention=cache.gpu < 1,
    )
    return predict(shapes[row["model"]], load_machine(_MACHINE), Workload(row["prompt"], _NEW_TOKENS), policy, form)


def _shares(percent: Sequence[float], at: int) -> Shares:
    gpu, host = percent[at : at + 2]
    return Shares(gpu / 100, host / 100, (100 - gpu - host) / 100)


def _values(prediction: Prediction) -> dict[str, float]:
    values = {"tokens_per_second": prediction.tokens_per_second}
    for phase, seconds in (("prefill", prediction.prefill_s), ("decode", prediction.decode_s)):
        values[f"{phase}_seconds"] = seconds
        values |= {f"{phase}_{part}_seconds": value for part, value in prediction.breakdown(phase).items()}
    return values


def _blind_rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows = tomllib.loads(file.read_text("utf-8"))["flexgen"]["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"blind must be a TOML file with rows in a table [flexgen], not {file}: {error}") from error
    if not isinstance(rows, list):
        raise CommandError(f"blind must have a list of rows in [flexgen], not {rows!r}")
    for row in rows:
        _check_row(row)
    return rows


def _check_row(row: Any) -> None:
    kinds = _REQUIRED | _OPTIONAL
    if not isinstance(row, dict) or not _REQUIRED.keys() <= row.keys() or not row.keys() <= kinds.keys():
        raise CommandError(f"a row must have {', '.join(_REQUIRED)} and may have {', '.join(_OPTIONAL)}, not {row!r}")
    for key, value in row.items():
        if type(value) is not kinds[key]:
            raise CommandError(f"{key} of a row must be {kinds[key].__name__}, not {value!r}")
    percent = row["percent"]
    if len(percent) != 6 or not all(isinstance(share, int | float) for share in percent):
        raise CommandError(f"percent of a row must be six numbers, not {percent!r}")
