"""Data files of explore: TOML tables of parts, with a unit in every key and a source in every table.

A part is read into the dataclass of its kind to the last key. `read_part` takes the files that come with nearflash, or
one of yours: a file holds tables of one kind, named as people name the part.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from nearflash.abi.errors import PlanError
from nearflash.support.tables import TableReader, read_toml

__all__ = ["UNITS", "current_changes", "own_tables", "part_names", "read_part", "table", "what_if"]

_Part = TypeVar("_Part")
UNITS = (
    "_bytes", "_bytes_per_s", "_flops_per_s", "_ops_per_s", "_params_per_s", "_s", "_us", "_hz", "_fraction", "_count",
    "_bits", "_pj_per_bit", "_usd_per_gb", "_usd_per_kwh", "_usd", "_w",
    "_cycles", "_bytes_per_param", "_years", "_tokens", "_layers",
    "_passes", "_mm2", "_um2", "_mm2_per_mbit", "_per_cm2",
)  # fmt: skip
"""How the key of a number ends."""
_CHANGES: ContextVar[tuple[tuple[str, float], ...]] = ContextVar("changes", default=())
_LEAST, _MOST = 1e-24, 1e24
"""Of a number with a unit: beyond, results are no numbers any more."""
_MAY_BE_ZERO = ("layer_s", "overhead_us", "spare_bytes", "keys_count", "index_fraction")


@cache
def own_tables(folder: str, file: str) -> Mapping[str, Any]:
    """A data file that comes with explore, read once."""
    return tomllib.loads((files("nearflash.explore") / folder / file).read_text("utf-8"))


def part_names(kind: type) -> list[str]:
    """Names of the parts of a kind that come with nearflash."""
    return sorted(own_tables("hardware", _file(kind)))


def read_part(kind: type[_Part], name: str, path: Path | None = None) -> _Part:
    """The part of that name, from nearflash's own file or from `path`. Raises PlanError for one that is not there."""
    tables = own_tables("hardware", _file(kind)) if path is None else read_toml(path, PlanError)
    what = _file(kind).removesuffix(".toml")
    if name not in tables:
        raise PlanError(f"{what} must be one of {', '.join(sorted(tables))}, not {name!r}")
    begin = f"{what}.{name}."
    changed = {key.removeprefix(begin): value for key, value in _CHANGES.get() if key.startswith(begin)}
    return table(kind, {**tables[name], **changed} if changed else tables[name], name)


def current_changes() -> tuple[tuple[str, float], ...]:
    """Changes that what_if makes here: a key for caches of parts."""
    return _CHANGES.get()


@contextmanager
def what_if(changes: Mapping[str, float]) -> Iterator[None]:
    """Read parts with other values in this block: `FILE.PART.KEY`, as in `gpu.a5000.memory_bytes_per_s`.

    Raises PlanError for a key that no part has, before anything is computed.
    """
    for key in changes:
        file, _, rest = key.partition(".")
        part, _, name = rest.rpartition(".")
        try:
            known = own_tables("hardware", f"{file}.toml")[part][name]
        except (OSError, KeyError) as error:
            raise PlanError(f"what-if must name FILE.PART.KEY of explore/hardware, not {key!r}") from error
        if not isinstance(known, int | float):
            raise PlanError(f"what-if must change a number, not {key!r}")
    token = _CHANGES.set(tuple(sorted({**dict(_CHANGES.get()), **changes}.items())))
    try:
        yield
    finally:
        _CHANGES.reset(token)


def _file(kind: type) -> str:
    return f"{getattr(kind, 'FILE', kind.__name__.lower())}.toml"


def table(kind: type[_Part], body: object, what: str) -> _Part:
    """A dataclass from a table. Raises PlanError for a missing, unknown, negative or not finite value."""
    return TableReader(PlanError, _rule).parse(kind, body, what)


def _rule(key: str, hint: Any, value: Any) -> str:
    if hint is bool:
        return ""
    if isinstance(value, list):
        return "" if value else "a list of numbers"
    if hint is str:
        return "" if value.strip() else "text"
    if not abs(value) < math.inf:
        return "a number"
    if value < 0 or (value == 0 and not key.endswith(_MAY_BE_ZERO)):
        return "above 0"
    if value and not _LEAST <= value <= _MOST:
        return f"between {_LEAST:g} and {_MOST:g}"
    return "between 0 and 1" if key.endswith("_fraction") and value > 1 else ""
