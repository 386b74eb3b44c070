"""Which release of nearflash is installed: the whole of it, or a board's part (`make board-wheel`)."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["release"]


def release() -> str:
    """The version, as in pyproject.toml. Raises PackageNotFoundError where nearflash is not installed."""
    try:
        return version("nearflash")
    except PackageNotFoundError:
        return version("nearflash-board")
