"""Generation with models larger than memory: weights, KV cache and activations on tiers, computed in a zig-zag."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearflash.offload.cache.engines import KvPlaces
    from nearflash.offload.generation import OffloadedModel, generate
    from nearflash.offload.report import OffloadReport, OffloadResult
    from nearflash.offload.tiers.ledger import Budgets

__all__ = ["Budgets", "KvPlaces", "OffloadReport", "OffloadResult", "OffloadedModel", "generate"]

_HOMES = {
    "Budgets": "tiers.ledger",
    "KvPlaces": "cache.engines",
    "OffloadReport": "report",
    "OffloadResult": "report",
    "OffloadedModel": "generation",
    "generate": "generation",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the commands of this package are looked up by every `nearflash`, and must not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
