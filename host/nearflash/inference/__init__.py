"""Generation with a KV cache on flash: cache and attention for transformers, engines that attend to it, arrays."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearflash.inference.cache.attention import attach
    from nearflash.inference.cache.cache import NearflashCache
    from nearflash.inference.models import load_model
    from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
    from nearflash.inference.setup import open_engine

__all__ = ["AttentionMode", "AttentionPolicy", "NearflashCache", "attach", "load_model", "open_engine"]

_HOMES = {
    "AttentionMode": "policy.policy",
    "AttentionPolicy": "policy.policy",
    "NearflashCache": "cache.cache",
    "attach": "cache.attention",
    "load_model": "models",
    "open_engine": "setup",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the commands of this package are looked up by every `nearflash`, and must not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
