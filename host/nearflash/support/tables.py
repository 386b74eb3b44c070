"""Strict reading of JSON and TOML: a table is what its reader asks for to the last key, or an error says where not.

A valid checksum tells that a table is what was written, not that it was written by us.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from nearflash.abi.errors import StateError
from nearflash.abi.python310 import tomllib
from nearflash.support.files import MAX_TEXT_BYTES, read_text

__all__ = [
    "Rule", "TableReader", "at_least_zero", "brief", "check_fields", "check_integers", "read_json", "read_toml",
    "reject_constant",
]  # fmt: skip

_Kind = TypeVar("_Kind")
Rule: TypeAlias = Callable[[str, Any, Any], str]
"""Of a field's name, its type and a value of that type: what the value must be where it is not, empty where it is."""
_MOST_SHOWN = 80
"""Characters of a wrong value in a message."""
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a table"}


def read_json(path: Path, error: type[Exception], advice: str = "", max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """The value in a JSON file. Raises `error`, which ends with the advice, for a file that cannot be read."""
    return _read(json.loads, "JSON", path, error, advice, max_bytes)


def read_toml(path: Path, error: type[Exception], advice: str = "", max_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """The table in a TOML file. Raises `error`, which ends with the advice, for a file that cannot be read."""
    return dict(_read(tomllib.loads, "TOML", path, error, advice, max_bytes))


def _read(
    parse: Callable[[str], Any], form: str, path: Path, error: type[Exception], advice: str, max_bytes: int
) -> Any:
    try:
        return parse(read_text(path, max_bytes))
    except (OSError, ValueError, RecursionError) as cause:  # ValueError: also a number of thousands of digits
        why = getattr(cause, "strerror", None) or cause
        raise error(f"{path} must be a readable {form} file ({why}){advice and f': {advice}'}") from cause


@dataclass(frozen=True)
class TableReader:
    """Reads tables into dataclasses whose fields are text, integers, numbers, true or false, lists and tables of these,
    and dataclasses. complete: fields with a default must be there, too.
    """

    error: type[Exception]
    rule: Rule
    complete: bool = False

    def parse(self, kind: type[_Kind], body: object, what: str) -> _Kind:
        """An object of the dataclass. Raises `error` for anything but its table; the message begins with `what`."""
        if not isinstance(body, Mapping):
            raise self.error(f"{what} must be a table, not {brief(body)}")
        known = {field.name: field.default is field.default_factory is MISSING for field in fields(kind)}  # type: ignore[arg-type]
        if missing := [name for name, required in known.items() if name not in body and (required or self.complete)]:
            raise self.error(f"{what} must have {', '.join(missing)}")
        if unknown := [str(name) for name in body if name not in known]:
            raise self.error(f"{what} must have only {', '.join(known)}, not {', '.join(unknown)[:_MOST_SHOWN]}")
        hints = _hints(kind)
        return kind(**{key: self._field(key, hints[key], value, f"{what}.{key}") for key, value in body.items()})

    def _field(self, key: str, hint: Any, value: Any, what: str) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if is_dataclass(hint):
            return self.parse(hint, value, what)  # type: ignore[arg-type]
        if origin is UnionType:  # with None, which is a field that is not there
            hint, origin = arguments[0], None
        kinds = {Mapping: (dict,), tuple: (list,), float: (float, int)}.get(origin or hint, (origin or hint,))
        must = self.rule(key, hint, value) if type(value) in kinds else _NOUNS[kinds[0]]
        if must:
            raise self.error(f"{what} must be {must}, not {brief(value)}")
        if kinds == (dict,):
            return {name: self._field(key, arguments[1], item, f"{what}.{name}") for name, item in value.items()}
        if kinds == (list,):
            return tuple(self._field(key, arguments[0], item, f"{what}[{at}]") for at, item in enumerate(value))
        return value


def at_least_zero(key: str, hint: Any, value: Any) -> str:
    """The Rule of tables whose numbers are finite and not below 0."""
    return "" if hint not in (int, float) or 0 <= value < math.inf else "at least 0"


def check_fields(what: str, body: Any, **kinds: type) -> tuple[Any, ...]:
    """The values of a JSON object that has these fields and no others, each exactly of its kind. Raises StateError."""
    if type(body) is not dict or body.keys() != kinds.keys():
        fields_found = sorted(body) if type(body) is dict else type(body).__name__
        raise StateError(f"{what} must be an object of {', '.join(kinds)}, not of {str(fields_found)[:_MOST_SHOWN]}")
    for name, kind in kinds.items():
        if type(body[name]) is not kind or (kind is int and body[name] < 0):
            noun = "an integer of at least 0" if kind is int else _NOUNS[kind]
            raise StateError(f"{what} must have {noun} as {name}, not {brief(body[name])}")
    return tuple(body[name] for name in kinds)


def check_integers(what: str, values: Any) -> list[int]:
    """A JSON list of integers of at least 0. Raises StateError."""
    if type(values) is not list or any(type(value) is not int or value < 0 for value in values):
        raise StateError(f"{what} must be a list of integers of at least 0, not {brief(values)}")
    return values


def brief(value: object) -> str:
    """For a message; Python writes no whole number of thousands of digits, which TOML has in other bases."""
    try:
        return repr(value)[:_MOST_SHOWN]
    except ValueError:
        return f"one of type {type(value).__name__} that is too long to show"


def reject_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which json reads though JSON has none; for its `parse_constant`."""
    raise ValueError(f"{name} is no JSON")
