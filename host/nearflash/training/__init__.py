"""torch optimizers whose state lives on flash and is updated by near-storage devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearflash.training.compression import TopK
    from nearflash.training.optimizer import NearStorageOptimizer
    from nearflash.training.optimizers import (
        NearStorageAdagrad,
        NearStorageAdam,
        NearStorageAdamW,
        NearStorageLion,
        NearStorageSGD,
    )
    from nearflash.training.scaler import LossScale
    from nearflash.training.stalls import Stalls
    from nearflash.training.timeline import Timeline
    from nearflash.training.traffic import Traffic

__all__ = [
    "LossScale",
    "NearStorageAdagrad",
    "NearStorageAdam",
    "NearStorageAdamW",
    "NearStorageLion",
    "NearStorageOptimizer",
    "NearStorageSGD",
    "Stalls",
    "Timeline",
    "TopK",
    "Traffic",
]

_HOMES = {
    "LossScale": "scaler",
    "NearStorageOptimizer": "optimizer",
    "Stalls": "stalls",
    "Timeline": "timeline",
    "TopK": "compression",
    "Traffic": "traffic",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the commands of this package are looked up by every `nearflash`, and must not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'optimizers')}"), name)
