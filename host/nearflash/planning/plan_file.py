"""A plan in a file: the policy, the shape and workload that it is for, and what was predicted. JSON, versioned, strict.

`nearflash tune` keeps it beside the model as PLAN_NAME.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from nearflash.abi.errors import CommandError, PlanError
from nearflash.planning.explain import summary
from nearflash.planning.policy import OffloadPolicy
from nearflash.planning.search import Plan
from nearflash.planning.shapes import ModelShape
from nearflash.planning.terms import Workload
from nearflash.support.files import write_durably
from nearflash.support.tables import TableReader, read_json

__all__ = ["PLAN_NAME", "PlanFile", "plan_text", "read_plan", "write_plan"]

PLAN_NAME = "nearflash-plan.json"
_FORMAT, _VERSION = "nearflash plan", 5
_CLOSE = 0.01
"""Of the bytes of compressed weights: a plan leaves more room than that."""
_MOST_COUNT, _MOST = 1 << 53, 1e300


@dataclass(frozen=True)
class _Prediction:
    """The kept part of nearflash.planning.explain.summary, whose keys these are."""

    tokens_per_second: float
    decode_tokens_per_second: float
    prefill_seconds: float
    decode_seconds: float
    prefill_parts_seconds: dict[str, float]
    decode_parts_seconds: dict[str, float]
    peak_bytes: dict[str, float]
    bytes_per_token: dict[str, float]
    disk_written_bytes: float
    bottleneck: str


@dataclass(frozen=True)
class _Stored:
    """A file's table."""

    format: str
    version: int
    shape_digest: str
    machine: str
    ranks: int
    workload: Workload
    policy: OffloadPolicy
    prediction: _Prediction


@dataclass(frozen=True)
class PlanFile:
    """Content of a plan's file; `prediction` has the keys of nearflash.planning.explain.summary that are kept."""

    policy: OffloadPolicy
    workload: Workload
    shape_digest: str
    machine: str
    prediction: dict[str, Any]
    ranks: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The content of the file of a plan."""
        found = summary(plan)
        prediction = {each.name: found[each.name] for each in fields(_Prediction)}
        return cls(plan.policy, plan.workload, plan.shape.digest(), plan.machine.name, prediction, plan.ranks)

    def check(self, shape: ModelShape, stored_fraction: float = 1.0, ranks: int = 1) -> None:
        """Raises PlanError for a model of another shape than the plan's (its dtype's bytes included), or whose weights
        are stored in another fraction of their bytes, and for other ranks: what a plan places would have other sizes.

        A plan decides where things lie, never what is computed: it serves every model of these bytes.
        """
        if shape.digest() != self.shape_digest:
            raise PlanError(
                f"a plan must be for the model that runs it: this one is for shape {self.shape_digest[:12]}, the "
                f"model's is {shape.digest()[:12]}; make it again: nearflash plan MODEL"
            )
        if ranks != self.ranks:
            raise PlanError(
                f"a plan must be for the ranks that run it: this one is for {self.ranks}, not {ranks}; make it again: "
                f"nearflash plan MODEL --ranks {ranks}"
            )
        planned = self.policy.stored_fraction
        if not math.isclose(planned, stored_fraction, rel_tol=_CLOSE):
            raise PlanError(
                f"a plan must be for weights as they are stored: this one is for {planned:.3f} of their dense bytes, "
                f"the model's take {stored_fraction:.3f}; make it again: nearflash plan MODEL"
            )


def plan_text(plan: Plan) -> str:
    """The file's text."""
    values = {"format": _FORMAT, "version": _VERSION, **asdict(PlanFile.of(plan))}
    return json.dumps({each.name: values[each.name] for each in fields(_Stored)}, indent=1) + "\n"


def write_plan(plan: Plan, file: Path) -> None:
    """Write the file (0600), durably, in place of an older one at once. Raises PlanError where it cannot."""
    try:
        write_durably(file, plan_text(plan))
    except OSError as error:
        raise PlanError(f"{file} must be writable to keep the plan: {error.strerror}") from error


def read_plan(file: Path) -> PlanFile:
    """A plan from its file. Raises PlanError for anything else, naming what is wrong."""
    what, body = f"{file}: plan", read_json(file, PlanError)
    if isinstance(body, dict) and body.get("version") in range(1, _VERSION):
        found = body["version"]
        raise PlanError(f"{what} must have version {_VERSION}, not {found}; make it again: nearflash plan MODEL")
    try:
        stored = TableReader(PlanError, _rule, complete=True).parse(_Stored, body, what)
    except CommandError as error:
        raise PlanError(f"{what}: {error}") from error
    if (stored.format, stored.version) != (_FORMAT, _VERSION):
        raise PlanError(f"{what} must have format {_FORMAT!r}, version {_VERSION}, not {stored.format!r}, "
                        f"{stored.version!r}; make it again: nearflash plan MODEL")  # fmt: skip
    return PlanFile(
        stored.policy, stored.workload, stored.shape_digest, stored.machine, asdict(stored.prediction), stored.ranks
    )


def _rule(key: str, hint: Any, value: Any) -> str:
    if hint is int and not 0 < value < _MOST_COUNT:
        return "a whole number, 1 at least"
    return "" if hint is not float or abs(value) < _MOST else "a number"
