"""Errors by name, as transcripts and remote devices carry them."""

from typing import Any

from nearflash.abi import errors
from nearflash.abi.errors import NearflashError, StreamError

__all__ = ["describe_error", "recall_error"]


def describe_error(error: NearflashError) -> dict[str, Any]:
    """The error's name and text, as JSON has them, and the fault of a StreamError."""
    fault = {"fault": int(error.fault)} if isinstance(error, StreamError) else {}
    return {"error": [type(error).__name__, str(error)], **fault}


def recall_error(body: dict[str, Any]) -> NearflashError | None:
    """The error that was described; None where what stands there is no error of ours."""
    described, fault = body.get("error"), body.get("fault")
    if type(described) is not list or [type(part) for part in described] != [str, str]:
        return None
    name, text = described
    kind = getattr(errors, name) if name in errors.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, NearflashError)):
        return None
    if kind is StreamError:
        return StreamError(text, fault if type(fault) is int else 0)
    return kind(text)
