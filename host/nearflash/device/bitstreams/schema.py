"""Checked reading of the tables that describe boards and bitstreams: TOML or JSON into frozen dataclasses.

A file is accepted to the last key or rejected with a ConfigError that names the key. Numbers are integers, and may be
0 where a field's metadata allow it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nearflash.abi.errors import ConfigError

__all__ = ["parse_table"]

_Kind = TypeVar("_Kind")


def parse_table(kind: type[_Kind], body: object, what: str) -> _Kind:
    """An object of the dataclass `kind` from a table; `what` names the table in errors.

    Fields may be text, integers of at least 0, floats, tuples of text, mappings from text, and dataclasses of these.
    Raises ConfigError for anything but such a table.
    """
    if not isinstance(body, Mapping):
        raise ConfigError(f"{what} must be a table, not {body!r}")
    hints = get_type_hints(kind)
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}  # type: ignore[arg-type]
    if missing := sorted(required - body.keys()):
        raise ConfigError(f"{what} must have {', '.join(missing)}")
    if unknown := sorted(map(str, body.keys() - hints.keys())):
        raise ConfigError(f"{what} must have only {', '.join(hints)}, not {', '.join(unknown)}")
    return kind(**{key: _value(hints[key], value, f"{what}: {key}") for key, value in body.items()})


def _value(hint: Any, value: object, what: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return parse_table(hint, value, what)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{what} must be a list, not {value!r}")
        return tuple(_value(arguments[0], each, what) for each in value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{what} must be a table, not {value!r}")
        return {_value(str, key, what): _value(arguments[1], each, f"{what}.{key}") for key, each in value.items()}
    if hint is str:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{what} must be text, not {value!r}")
        return value
    whole = hint is int
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{what} must be {'an integer' if whole else 'a number'} of at least 0, not {value!r}")
    return value if whole else float(value)
