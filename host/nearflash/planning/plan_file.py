"""A plan in a file: the policy, the shape and workload that it is for, and what was predicted. JSON, versioned, strict.

`nearflash tune` keeps it beside the model as PLAN_NAME.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from nearflash.abi.errors import CommandError, PlanError
from nearflash.planning.explain import summary
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.search import Plan
from nearflash.planning.shapes import ModelShape
from nearflash.planning.terms import Workload
from nearflash.support.files import read_text, write_durably

__all__ = ["PLAN_NAME", "PlanFile", "plan_text", "read_plan", "write_plan"]

PLAN_NAME = "nearflash-plan.json"
_FORMAT, _VERSION = "nearflash plan", 2
_CLOSE = 0.01
"""Of the bytes of compressed weights: a plan leaves more room than that."""
_KEYS = ("format", "version", "shape_digest", "machine", "workload", "policy", "prediction")
_PREDICTION = {
    "tokens_per_second": float, "decode_tokens_per_second": float, "prefill_seconds": float, "decode_seconds": float,
    "prefill_parts_seconds": dict, "decode_parts_seconds": dict, "peak_bytes": dict, "bytes_per_token": dict,
    "disk_written_bytes": float, "bottleneck": str,
}  # fmt: skip


@dataclass(frozen=True)
class PlanFile:
    """What a plan's file holds; `prediction` has the keys of nearflash.planning.explain.summary that are kept."""

    policy: OffloadPolicy
    workload: Workload
    shape_digest: str
    machine: str
    prediction: dict[str, Any]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """What a plan's file would hold."""
        found = summary(plan)
        prediction = {key: found[key] for key in _PREDICTION}
        return cls(plan.policy, plan.workload, plan.shape.digest(), plan.machine.name, prediction)

    def check(self, shape: ModelShape, stored_fraction: float = 1.0) -> None:
        """Raises PlanError for a model of another shape than the plan's (its dtype's bytes included), or whose weights
        are stored in another fraction of their bytes: what a plan places would have other sizes.

        A plan decides where things lie, never what is computed: it serves every model of these bytes.
        """
        if shape.digest() != self.shape_digest:
            raise PlanError(
                f"a plan must be for the model that runs it: this one is for shape {self.shape_digest[:12]}, the "
                f"model's is {shape.digest()[:12]}; make it again: nearflash plan MODEL"
            )
        planned = self.policy.stored_fraction
        if not math.isclose(planned, stored_fraction, rel_tol=_CLOSE):
            raise PlanError(
                f"a plan must be for weights as they are stored: this one is for {planned:.3f} of their dense bytes, "
                f"the model's take {stored_fraction:.3f}; make it again: nearflash plan MODEL"
            )


def plan_text(plan: Plan) -> str:
    """The file's text."""
    values = asdict(PlanFile.of(plan))
    body = {"format": _FORMAT, "version": _VERSION, **{key: values[key] for key in _KEYS[2:]}}
    return json.dumps(body, indent=1) + "\n"


def write_plan(plan: Plan, file: Path) -> None:
    """Write the file (0600), durably, in place of an older one at once. Raises PlanError where it cannot."""
    try:
        write_durably(file, plan_text(plan))
    except OSError as error:
        raise PlanError(f"{file} must be writable to keep the plan: {error.strerror}") from error


def read_plan(file: Path) -> PlanFile:
    """A plan from its file. Raises PlanError for anything else, naming what is wrong."""
    try:
        body = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{file} must be a readable plan in JSON: {error}") from error
    what = f"the plan in {file}"
    body = _object(body, _KEYS, what)
    if body["format"] != _FORMAT or body["version"] != _VERSION or isinstance(body["version"], bool):
        raise PlanError(f"{what} must have format {_FORMAT!r}, version {_VERSION}, not {body['format']!r}, "
                        f"{body['version']!r}; make it again: nearflash plan MODEL")  # fmt: skip
    for key in ("shape_digest", "machine"):
        if not isinstance(body[key], str):
            raise PlanError(f"{what}: {key} must be text, not {body[key]!r}")
    workload = _object(body["workload"], [each.name for each in fields(Workload)], f"{what}: workload")
    for key, value in workload.items():
        _whole(value, f"{what}: workload.{key}")
    return PlanFile(_policy(body["policy"], f"{what}: policy"), Workload(**workload), body["shape_digest"],
                    body["machine"], _prediction(body["prediction"], f"{what}: prediction"))  # fmt: skip


def _policy(body: Any, what: str) -> OffloadPolicy:
    values = _object(body, [each.name for each in fields(OffloadPolicy)], what)
    for key in ("weights", "cache", "activations"):
        shares = _object(values[key], [each.name for each in fields(Shares)], f"{what}.{key}")
        values[key] = {tier: _number(share, f"{what}.{key}.{tier}") for tier, share in shares.items()}
    for key in ("batch_size", "num_batches", "weight_bits", "cache_bits"):
        _whole(values[key], f"{what}.{key}")
    for key in ("overlap", "cpu_attention"):
        if not isinstance(values[key], bool):
            raise PlanError(f"{what}.{key} must be true or false, not {values[key]!r}")
    values["stored_fraction"] = _number(values["stored_fraction"], f"{what}.stored_fraction")
    try:
        parts = {key: Shares(**values[key]) for key in ("weights", "cache", "activations")}
        return OffloadPolicy(**{**values, **parts})
    except CommandError as error:
        raise PlanError(f"{what}: {error}") from error


def _prediction(body: Any, what: str) -> dict[str, Any]:
    values = _object(body, list(_PREDICTION), what)
    for key, kind in _PREDICTION.items():
        if kind is float:
            values[key] = _number(values[key], f"{what}.{key}")
        elif kind is dict:
            values[key] = {str(name): _number(value, f"{what}.{key}")
                           for name, value in _object(values[key], None, f"{what}.{key}").items()}  # fmt: skip
        elif not isinstance(values[key], str):
            raise PlanError(f"{what}.{key} must be text, not {values[key]!r}")
    return values


def _object(body: Any, keys: Any, what: str) -> dict[str, Any]:
    if not isinstance(body, Mapping):
        raise PlanError(f"{what} must be an object, not {body!r}")
    if keys is not None and set(body) != set(keys):
        raise PlanError(f"{what} must have the keys {', '.join(keys)}, not {', '.join(map(str, body)) or 'none'}")
    return dict(body)


def _whole(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 53:
        raise PlanError(f"{what} must be a whole number, 1 at least, not {value!r}")


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300 or math.isnan(value):
        raise PlanError(f"{what} must be a number, not {value!r}")
    return float(value)
