"""Options of a bench, declared where its `run` function declares its parameters.

`tokens: Annotated[int, Option("Tokens of a sequence.", int)] = 4096` is the option `--tokens`. Parameters without an
Option are for Python alone.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import signature
from typing import Any, get_type_hints

from nearflash.abi.errors import CommandError

__all__ = ["Option", "add_options", "check_choices", "options_of"]


@dataclass(frozen=True)
class Option:
    """A parameter of a bench as the command line has it."""

    help: str
    """A full sentence."""
    kind: Callable[[str], Any] = str
    """Value of one argument."""
    many: bool = False
    """One or more arguments, given as a list."""
    choices: Collection[str] | None = None
    """The arguments that exist, where they are few."""
    metavar: str | None = None


def options_of(run: Callable[..., Any]) -> dict[str, Option]:
    """The parameters that have an Option, by name."""
    hints = get_type_hints(run, include_extras=True)
    declared = {
        name: [metadata for metadata in getattr(hints.get(name), "__metadata__", ()) if isinstance(metadata, Option)]
        for name in signature(run).parameters
    }
    return {name: options[0] for name, options in declared.items() if options}


def check_choices(name: str, given: Collection[str] | None, known: Collection[str]) -> list[str]:
    """The choices of an option, all that are `known` where none are given. Raises CommandError for others."""
    if unknown := [str(choice) for choice in given or () if choice not in known]:
        raise CommandError(f"{name} must be of {', '.join(known)}, not {', '.join(unknown)}")
    return list(known if given is None else given)


def add_options(parser: ArgumentParser, run: Callable[..., Any]) -> list[str]:
    """Add a bench's options to a parser, None where one is not given; their names."""
    options, parameters = options_of(run), signature(run).parameters
    for name, option in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            type=option.kind,
            nargs="+" if option.many else None,
            choices=None if option.choices is None else list(option.choices),
            metavar=option.metavar or (name.removesuffix("s").upper() if option.choices or option.many else None),
            help=" ".join([option.help, *_among(option), *_default(parameters[name].default)]).replace("%", "%%"),
        )
    return list(options)


def _among(option: Option) -> list[str]:
    return [] if option.choices is None else [f"{'Some' if option.many else 'One'} of {', '.join(option.choices)}."]


def _default(value: object) -> list[str]:
    if value is None or value == ():
        return []
    shown = value if isinstance(value, str) or not isinstance(value, Collection) else " ".join(map(str, value))
    return [f"(default: {shown})"]
