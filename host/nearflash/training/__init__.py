"""torch optimizers whose state lives on flash and is updated by a near-storage device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearflash.training.optimizer import NearStorageAdamW
    from nearflash.training.timeline import Timeline
    from nearflash.training.traffic import Traffic

__all__ = ["NearStorageAdamW", "Timeline", "Traffic"]

_HOMES = {"NearStorageAdamW": "optimizer", "Timeline": "timeline", "Traffic": "traffic"}


def __getattr__(name: str) -> Any:
    """Import on first use: the commands of this package must not load torch before they run."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
