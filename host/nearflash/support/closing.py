"""The end of a `with` block closes what it is of."""

from typing import TypeVar

__all__ = ["Closing"]

_T = TypeVar("_T", bound="Closing")
"""As Self, which Python 3.10 of a board does not have."""


class Closing:
    """A class with `close()`, which may be called twice: its instances are context managers that call it."""

    def close(self) -> None:
        """Release what the instance holds."""
        raise NotImplementedError

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
