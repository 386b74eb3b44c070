"""torch optimizers whose state lives on flash and is updated by near-storage devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearflash.training.gradients.compression import TopK
    from nearflash.training.gradients.scaler import LossScale
    from nearflash.training.optimizers.base import NearStorageOptimizer
    from nearflash.training.optimizers.classes import (
        NearStorageAdagrad,
        NearStorageAdam,
        NearStorageAdamW,
        NearStorageLion,
        NearStorageSGD,
    )
    from nearflash.training.step.stalls import Stalls
    from nearflash.training.step.timeline import Timeline
    from nearflash.training.step.traffic import Traffic

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
    "LossScale": "gradients.scaler",
    "NearStorageOptimizer": "optimizers.base",
    "Stalls": "step.stalls",
    "Timeline": "step.timeline",
    "TopK": "gradients.compression",
    "Traffic": "step.traffic",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the commands of this package are looked up by every `nearflash`, and must not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'optimizers.classes')}"), name)
