"""Whether an engine's interface is the one that an adapter was written for."""

import inspect
from collections.abc import Mapping

from nearflash.abi.errors import UnsupportedError

__all__ = ["check_interface"]


def check_interface(interface: type, methods: Mapping[str, tuple[str, ...]], engine: str) -> None:
    """Raise UnsupportedError, naming the method, where an engine's abstract class has others than these, or one of them
    takes other parameters (by name, without self)."""
    abstract = getattr(interface, "__abstractmethods__", frozenset[str]())
    if unknown := sorted(abstract - methods.keys()):
        raise UnsupportedError(f"{engine} must need none but known methods of a tier, not {', '.join(unknown)}")
    for name, parameters in methods.items():
        method = getattr(interface, name, None)
        found = tuple(inspect.signature(method).parameters)[1:] if method else None
        if found != parameters:
            raise UnsupportedError(f"{engine} must call {name}{parameters} of a tier, not {found}: use another version")
